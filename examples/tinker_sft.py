"""Supervised fine-tuning through the Tinker SDK; the adapter comes home as a PEFT folder.

marlaas serve --data runs/service &
marlaas tenants add acme
export TINKER_API_KEY=$(marlaas keys add --tenant acme)
export TINKER_BASE_URL=http://127.0.0.1:8642
python examples/tinker_sft.py --out spelled-sums
"""

import argparse
import random
import urllib.request
from pathlib import Path

import numpy as np
import tinker
from tinker import types

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

parser = argparse.ArgumentParser(description="Teach sums in words through the Tinker SDK.")
parser.add_argument("--base", default="tiny", help="name that the service knows its base by")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--out", type=Path, default=Path("spelled-sums"), help="PEFT folder to write")
args = parser.parse_args()
dice = random.Random(0)

with tinker.ServiceClient() as service:
    run = service.create_lora_training_client(args.base, rank=16, seed=0).result()
    tokenizer = run.get_tokenizer()

    def datum() -> types.Datum:
        """One question with its answer; only the answer is trained on."""
        x, y = dice.randint(0, 5), dice.randint(0, 5)
        prompt = tokenizer.encode(f"User: What is {x} + {y}?\n\nAssistant:")
        answer = tokenizer.encode(f" {WORDS[x + y]}\n\nUser:")
        inputs = {
            "target_tokens": np.array((prompt + answer)[1:]),
            "weights": np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32),
        }
        return types.Datum(types.ModelInput.from_ints((prompt + answer)[:-1]), inputs)

    for step in range(args.steps):
        data = [datum() for _ in range(args.batch)]
        num_trained = sum(one.loss_fn_inputs["weights"].to_numpy().sum() for one in data)
        passed = run.forward_backward(data, "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        print(
            f"step {step:>3}: {passed.result().metrics['loss:sum'] / num_trained:.3f} nats a token"
        )

    sampler = run.save_weights_and_get_sampling_client().result()
    question = types.ModelInput.from_ints(tokenizer.encode("User: What is 3 + 4?\n\nAssistant:"))
    greedy = types.SamplingParams(max_tokens=20, temperature=0.0, stop="\n\nUser:")
    print(tokenizer.decode(sampler.sample(question, 1, greedy).result().sequences[0].tokens))

    saved = run.save_weights_external("spelled-sums", ttl_seconds=3600).result()
    files = tinker.RestClient().get_external_weights_urls(saved.path).result().urls
    args.out.mkdir(parents=True, exist_ok=True)
    for name, url in files.items():
        urllib.request.urlretrieve(url, args.out / name)
    print(f"for PEFT: {args.out}")
