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
parser.add_argument("--prompts", type=int, default=8, help="questions in a step")
parser.add_argument("--group", type=int, default=8, help="answers to each question")
args = parser.parse_args()
dice = random.Random(0)
ASKED = 'What is {} + {} + {}? End with "Answer: " and the number.'

with tinker.ServiceClient() as service:
    run = service.create_lora_training_client(args.base, rank=32, seed=0).result()
    tokenizer = run.get_tokenizer()
    limits = types.SamplingParams(max_tokens=40, stop=[tokenizer.eos_token_id])
    for step in range(args.steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        sums = [[dice.randint(1, 20) for _ in range(3)] for _ in range(args.prompts)]
        chat = [[{"role": "user", "content": ASKED.format(*terms)}] for terms in sums]
        prompts = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answers = [
            sampler.sample(types.ModelInput.from_ints(prompt), args.group, limits)
            for prompt in prompts
        ]
        data, rewards = [], []
        for terms, prompt, answer in zip(sums, prompts, answers, strict=True):
            sequences = answer.result().sequences
            replies = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
            group = np.array([float(said.endswith(f"Answer: {sum(terms)}")) for said in replies])
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
            run.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    print(run.save_state("sums").result().path)
