"""Train on prompts and a reward of one's own, then talk to what came out.

marlaas serve --data runs/service &
python examples/custom_env.py
"""

import argparse
from pathlib import Path

import marlaas

QUESTION = 'What is {} + {}? End with "Answer: " and the number.'

parser = argparse.ArgumentParser(description="Train on prompts and a reward of one's own.")
parser.add_argument("--name", default="brief-sums", help="name of the job")
parser.add_argument("--steps", type=int, default=16)
args = parser.parse_args()

with marlaas.Client() as client:
    client.upload_environment("brief", Path(__file__).with_name("custom_reward.py"))
    # What a line has beside its prompt is handed to the reward.
    client.upload_prompts(
        "sums",
        [
            {"prompt": QUESTION.format(a, b), "answer": a + b}
            for a in range(2, 20)
            for b in range(2, 20)
        ],
    )
    job = client.jobs.create(
        name=args.name,
        env={"family": "custom", "environment": "brief", "prompts": "sums"},
        steps=args.steps,
        eval_prompts=32,
    )
    job.wait(progress=True)
    for event in job.logs():  # what the reward printed, or how it failed
        print(event.data)
    for evaluation in job.evaluations():
        print(f"version {evaluation.version}: held-out reward {evaluation.reward:.2f}")

    best = max(job.groups(), key=lambda group: group.reward_mean or 0.0)
    rollout = job.group(best.index).trajectories[0]
    for message in rollout.messages:
        print(f"{message.role}: {message.content}")
    print(f"reward: {rollout.reward}\n")

    for model in ("base", job.adapter("latest").model):
        reply = client.chat(model, QUESTION.format(7, 5), max_tokens=40, temperature=0)
        print(f"{model}: {reply}")
