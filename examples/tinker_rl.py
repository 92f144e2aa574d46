"""Reinforcement learning through the Tinker SDK: sums, with nothing but samples and rewards.

marlaas serve --data runs/service &
marlaas tenants add acme
export TINKER_API_KEY=$(marlaas keys add --tenant acme)
export TINKER_BASE_URL=http://127.0.0.1:8642
python examples/tinker_rl.py --steps 20
"""

import argparse
import random

import numpy as np
import tinker
from tinker import types

parser = argparse.ArgumentParser(description="Train on sums through the Tinker SDK.")
parser.add_argument("--base", default="tiny", help="name that the service knows its base by")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--prompts", type=int, default=16, help="questions in a step")
parser.add_argument("--group", type=int, default=8, help="answers to each question")
args = parser.parse_args()
dice = random.Random(0)

with tinker.ServiceClient() as service:
    run = service.create_lora_training_client(args.base, rank=32, seed=0).result()
    tokenizer = run.get_tokenizer()
    asked = types.SamplingParams(max_tokens=12, stop="\n\nUser:")
    for step in range(args.steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        sums = [(dice.randint(0, 99), dice.randint(0, 99)) for _ in range(args.prompts)]
        prompts = [tokenizer.encode(f"User: What is {x} + {y}?\n\nAssistant:") for x, y in sums]
        answers = [
            sampler.sample(types.ModelInput.from_ints(prompt), args.group, asked)
            for prompt in prompts
        ]
        data, rewards = [], []
        for (x, y), prompt, answer in zip(sums, prompts, answers, strict=True):
            sequences = answer.result().sequences
            texts = [tokenizer.decode(one.tokens) for one in sequences]
            group = np.array([float(text.split("\n")[0].strip() == str(x + y)) for text in texts])
            rewards.append(group.mean())
            if group.std() == 0:  # all right or all wrong: nothing to learn
                continue
            for sequence, advantage in zip(sequences, group - group.mean(), strict=True):
                tokens, blank = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
                inputs = {
                    "target_tokens": np.array(tokens[1:]),
                    "logprobs": np.array(blank + sequence.logprobs, np.float32),
                    "advantages": np.array(blank + [advantage] * len(sequence.tokens), np.float32),
                }
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
        print(f"step {step:>3}: reward {np.mean(rewards):.2f}")
        if data:
            run.forward_backward(data, "ppo")  # in order, so nobody has to wait for it
            run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(run.save_state("sums").result().path)
