"""Train on prompts and a reward of one's own, then talk to what came out.

marlaas serve --data runs/service &
python examples/custom_env.py
"""

import argparse
from pathlib import Path

import marlaas

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

parser = argparse.ArgumentParser(description="Train on prompts and a reward of one's own.")
parser.add_argument("--name", default="echo", help="name of the job")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

with marlaas.Client() as client:
    client.upload_environment("echo", Path(__file__).with_name("custom_reward.py"))
    # What a line has beside its prompt is handed to the reward.
    client.upload_prompts(
        "words",
        [{"prompt": f"Say: {word} {n}", "word": f"{word} {n}"} for word in WORDS for n in range(8)],
    )
    job = client.jobs.create(
        name=args.name,
        env={"family": "custom", "environment": "echo", "prompts": "words"},
        steps=args.steps,
        prompts_per_step=2,
        group_size=8,
        max_tokens=12,
        eval_prompts=8,
    )
    job.wait(progress=True)
    for event in job.logs():
        print(f"the reward said: {event.data}")

    best = max(job.groups(), key=lambda group: group.reward_mean or 0.0)
    rollout = job.group(best.index).trajectories[0]
    for message in rollout.messages:
        print(f"{message.role}: {message.content}")
    print(f"reward: {rollout.reward}")

    reply = client.chat(job.adapter("latest").model, "Say: seven 3", max_tokens=12, temperature=0)
    print(f"\nSay: seven 3 -> {reply}")
