"""Train a policy on sums against a running service, and take its best adapter home.

    marlaas serve --data runs/service &
    python examples/train_math.py --steps 24

The service and the key come from MARLAAS_URL and MARLAAS_API_KEY, or from the credentials file.
"""

import argparse
from pathlib import Path

import marlaas

parser = argparse.ArgumentParser(description="Train on sums.")
parser.add_argument("--name", default="sums", help="name of the job")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--out", type=Path, default=Path("sums-adapter"), help="PEFT folder to write")
args = parser.parse_args()

with marlaas.Client() as client:
    # Run it again and it finds the job that is there: the same job handed over twice is one job.
    job = client.jobs.create(
        name=args.name,
        env={"family": "math", "terms": 3},
        algorithm="dppo_tis",
        steps=args.steps,
        prompts_per_step=4,
        group_size=8,
        learning_rate=2e-3,
        eval_every=8,
        eval_prompts=64,
    )
    job.wait(progress=True)
    print(f"{job.name} is {job.state} after {job.step} steps. {job.reason}")

    # `pandas.DataFrame(job.metrics())` makes a data frame of it.
    print(f"\n{'step':>4} {'reward':>7} {'success':>8} {'staleness':>10}")
    for row in job.metrics():
        print(
            f"{row['step']:>4} {row['reward_mean']:>7.2f} {row['success']:>8.0%} "
            f"{row['staleness_mean']:>10.1f}"
        )
    for evaluation in job.evaluations():
        print(f"held-out success of version {evaluation.version}: {evaluation.success:.0%}")

    folder = job.adapter("best").download(args.out)
    print(f"\nThe best adapter, for PEFT: {folder}")
