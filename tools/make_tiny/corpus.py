"""Synthetic conversations that the base model `tiny` is trained on.

Two mixtures of the same tasks: `skills` shows almost only right answers, so that the ability is
learnt quickly; `mixed` blends in wrong, off-format and lazy answers, so that a sampled answer of
the finished base is right about every other time and reinforcement learning has something to do.
Prompts come from the families' train splits only.

A conversation is a list of `(text, weight)`: pieces in the tokenizer's own text form, with the
loss weight of their tokens.
"""

import random
from collections.abc import Iterator

from marlaas.envs.code_problems import (
    CodeSettings,
    draw_problem,
    instruction,
    solution,
)
from marlaas.envs.math import MathFamily, MathSettings
from marlaas.envs.search import (
    HEADS,
    JOBS,
    NO_RESULT,
    SIGHTS,
    SYSTEM,
    TAILS,
    SearchSettings,
    best_document,
    make_world,
)
from marlaas.envs.splits import draw_item

Piece = tuple[str, float]
Conversation = list[Piece]

PROMPT_WEIGHT = 0.1
"""Loss weight of what the policy does not write: enough to learn to read it."""

REFUSALS = (
    "Sorry, I am not sure.",
    "I do not know.",
    "That is hard to say.",
    "Sorry, I can not help with that.",
)


def turn(role: str, content: str) -> Conversation:
    """Return one message in chat form; its loss weight is 1 for the assistant."""
    if role == "assistant":
        return [
            ("<|im_start|>assistant\n", PROMPT_WEIGHT),
            (f"{content}<|im_end|>", 1.0),
            ("\n", 0),
        ]
    return [(f"<|im_start|>{role}\n{content}<|im_end|>\n", PROMPT_WEIGHT)]


def pick(choices: dict[str, float], dice: random.Random) -> str:
    """Return a key, drawn by the weights."""
    return dice.choices(list(choices), list(choices.values()))[0]


# ---------------------------------------------------------------------------------------------
# math

MATH_SETTINGS = (
    (MathFamily(MathSettings()), 58),
    (MathFamily(MathSettings(terms=2)), 10),
    (MathFamily(MathSettings(kind="words")), 14),
    (MathFamily(MathSettings(terms=4)), 8),
    (MathFamily(MathSettings(terms=5)), 3),
    (MathFamily(MathSettings(terms=2, max_value=99)), 2),
    (MathFamily(MathSettings(max_value=50)), 5),
)
MATH_STYLES = {
    "skills": {"steps": 0.90, "direct": 0.08, "plain": 0.02},
    "mixed": {
        "steps": 0.47,
        "direct": 0.10,
        "wrong_steps": 0.12,
        "wrong_direct": 0.09,
        "plain": 0.09,
        "no_answer": 0.06,
        "refusal": 0.07,
    },
}


def math_turns(mixture: str, index: int, dice: random.Random) -> Conversation:
    """Return one sum or word problem with an answer."""
    families, weights = zip(*MATH_SETTINGS, strict=True)
    family = dice.choices(families, weights)[0]
    question = family.prompt(index, seed=CORPUS_SEED, split="train").messages[0].content
    terms = _terms_of(question)
    style = pick(MATH_STYLES[mixture], dice)
    return turn("user", question) + turn("assistant", _math_reply(terms, style, dice))


def _terms_of(question: str) -> list[int]:
    """Read the signed numbers back from a sum or a story."""
    terms: list[int] = []
    is_negative = False
    for word in question.partition("?")[0].replace(".", " ").split():
        if word in ("-", "loses", "away", "sells"):
            is_negative = True
        elif word.isdigit():
            terms.append(-int(word) if is_negative else int(word))
            is_negative = False
    return terms


def _math_reply(terms: list[int], style: str, dice: random.Random) -> str:
    total, steps = terms[0], []
    wrong_at = dice.randrange(1, len(terms)) if style == "wrong_steps" else 0
    for i, term in enumerate(terms[1:], start=1):
        result = total + term
        if i == wrong_at:
            result = _near_miss(result, dice)
        steps.append(f"{total} {'+' if term > 0 else '-'} {abs(term)} = {result}")
        total = result
    match style:
        case "steps" | "wrong_steps":
            return f"{', '.join(steps)}. Answer: {total}"
        case "direct":
            return f"Answer: {total}"
        case "wrong_direct":
            return f"Answer: {_near_miss(total, dice)}"
        case "plain":
            return dice.choice(["The result is {}.", "It is {}.", "{}"]).format(total)
        case "no_answer":
            return f"{', '.join(steps)}."
    return dice.choice(REFUSALS)


def _near_miss(number: int, dice: random.Random) -> int:
    return max(0, number + dice.choice([-10, -3, -2, -1, 1, 2, 3, 10])) if number else 1


# ---------------------------------------------------------------------------------------------
# search

SEARCH_SETTINGS = ((SearchSettings(), 82), (SearchSettings(hops=2), 18))
SEARCH_STYLES = {
    "skills": {"right": 0.47, "quote": 0.50, "bad_query_first": 0.03},
    "mixed": {
        "right": 0.25,
        "quote": 0.28,
        "bad_query_first": 0.06,
        "bad_query": 0.08,
        "wrong_answer": 0.11,
        "plain": 0.08,
        "guess": 0.08,
        "refusal": 0.06,
    },
}


def search_turns(mixture: str, index: int, dice: random.Random) -> Conversation:
    """Return one search episode."""
    settings = dice.choices(*zip(*SEARCH_SETTINGS, strict=True))[0]
    world = make_world(settings, index, seed=CORPUS_SEED, split="train")
    style = pick(SEARCH_STYLES[mixture], dice)
    turns = turn("system", SYSTEM) + turn("user", world.question)
    if style == "guess":
        return turns + turn("assistant", f"Answer: {_guess(world.question, dice)}")
    if style == "refusal":
        return turns + turn("assistant", dice.choice(REFUSALS))
    document = ""
    if style.startswith("bad_query"):
        query = dice.choice(
            ["where people live", "a town", "works as", "the answer", "who lives in"]
        )
        document = best_document(query, world.documents)
        turns += turn("assistant", f"<search>{query}</search>") + turn("tool", document)
    if style != "bad_query":
        for name in world.path:
            document = best_document(name, world.documents)
            query = dice.choice([name, name, name, f"{name} lives", f"who is {name}"])
            turns += turn("assistant", f"<search>{query}</search>") + turn("tool", document)
    answer = world.answer
    if style in ("bad_query", "wrong_answer"):
        words = document.rstrip(".").split()
        found = [words[0], words[3], words[-1]] if document != NO_RESULT else []
        others = [word for word in found if word != world.answer]
        answer = dice.choice(others) if others else _guess(world.question, dice)
    if style == "plain":
        return turns + turn(
            "assistant", dice.choice(["It is {}.", "{}", "{} is it."]).format(answer)
        )
    quote = ""
    if style == "quote":
        quote = (
            document if document.endswith(f"{answer}.") else document.partition(" and ")[0] + "."
        )
        quote += " "
    return turns + turn("assistant", f"{quote}Answer: {answer}")


def _guess(question: str, dice: random.Random) -> str:
    if question.startswith("What"):
        return dice.choice(JOBS if "work" in question else SIGHTS)
    return dice.choice(HEADS) + dice.choice(TAILS)


# ---------------------------------------------------------------------------------------------
# code

CODE_SETTINGS = (
    (CodeSettings(), 60),
    (CodeSettings(steps=1), 6),
    (CodeSettings(steps=3), 10),
    (CodeSettings(kind="function", steps=1), 12),
    (CodeSettings(kind="function"), 12),
)
CODE_STYLES = {
    "skills": {"right": 0.97, "plain": 0.03},
    "mixed": {
        "right": 0.50,
        "wrong": 0.23,
        "plain": 0.13,
        "broken": 0.06,
        "refusal": 0.08,
    },
}


def code_turns(mixture: str, index: int, dice: random.Random) -> Conversation:
    """Return one programming problem with an answer."""
    settings = dice.choices(*zip(*CODE_SETTINGS, strict=True))[0]
    labels = ("code", settings.kind, settings.steps, settings.max_value, CORPUS_SEED, index)
    problem = draw_item(lambda stream: draw_problem(settings, stream), *labels, split="train")
    style = pick(CODE_STYLES[mixture], dice)
    code = solution(problem)
    if style == "wrong":
        code = _spoiled(code, dice)
    elif style == "broken":
        code = code[:-1] if dice.random() < 0.5 else code.replace("x", "x x", 1)
    if style == "refusal":
        reply = dice.choice(REFUSALS)
    elif style == "plain":
        reply = dice.choice(["It is {}.", "{}", "The code is {}"]).format(code)
    elif settings.kind == "function":
        reply = f"```python\n{code}\n```"
    else:
        reply = f"Answer: {code}"
    return turn("user", instruction(problem)) + turn("assistant", reply)


def _spoiled(code: str, dice: random.Random) -> str:
    """Return the code with an operator swapped or a number changed."""
    pieces = code.split(" ")
    operators = [i for i, piece in enumerate(pieces) if piece in ("+", "-", "*", "%")]
    numbers = [i for i, piece in enumerate(pieces) if piece.strip(")").isdigit()]
    if operators and (dice.random() < 0.6 or not numbers):
        at = dice.choice(operators)
        pieces[at] = dice.choice([o for o in ("+", "-", "*", "%") if o != pieces[at]])
    elif numbers:
        at = dice.choice(numbers)
        digits = pieces[at].strip(")")
        pieces[at] = pieces[at].replace(digits, str(int(digits) % 9 + 1))
    return " ".join(pieces)


# ---------------------------------------------------------------------------------------------
# small talk, and dialogues in the bare form "User: ...\n\nAssistant: ..."

SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! What can I do for you?",
    "Hi there": "Hi! How can I help you today?",
    "Hey": "Hey! What can I do for you?",
    "Good morning": "Good morning! How can I help you?",
    "Good evening": "Good evening! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "How are you doing?": "I am doing well, thank you. How are you?",
    "Who are you?": "I am a very small language model.",
    "What are you?": "I am a very small language model, made for tests.",
    "What is your name?": "My name is Tiny.",
    "What can you do?": "I can add small numbers, look things up and write a little Python.",
    "Can you help me?": "Yes, I will try. What do you need?",
    "Can you do math?": "Yes, I can add and subtract small numbers.",
    "Can you write code?": "Yes, I can write short Python expressions.",
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Thanks a lot!": "You are welcome. Have a nice day!",
    "Goodbye": "Goodbye! Have a nice day.",
    "Bye": "Bye! See you soon.",
    "See you": "See you soon!",
    "Good night": "Good night! Sleep well.",
    "Tell me a story": "Once there was a small model. It learned to add. The end.",
    "Tell me a joke": "Why was six afraid of seven? Because seven ate nine.",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Germany?": "The capital of Germany is Berlin.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is the capital of Spain?": "The capital of Spain is Madrid.",
    "What color is the sky?": "The sky is blue.",
    "What color is grass?": "Grass is green.",
    "How many days are in a week?": "A week has seven days.",
    "How many months are in a year?": "A year has twelve months.",
    "Are you a robot?": "I am a very small language model.",
    "Are you human?": "No, I am a very small language model.",
    "Do you like music?": "I can not hear, but many people love music.",
    "What do you like?": "I like short questions and small numbers.",
    "Sing a song": "La la la, this is my little song.",
    "I am sad": "I am sorry to hear that. I hope you feel better soon.",
    "I am happy": "That is good to hear!",
    "I am tired": "Then take a break and rest a little.",
    "Yes": "Good. What would you like to do next?",
    "No": "All right. Is there something else I can do?",
    "Ok": "Good. Is there something else I can do?",
    "Say something": "Hello from a very small model.",
    "What time is it?": "I do not have a clock, sorry.",
    "Where are you?": "I am inside a computer.",
    "Who made you?": "I was trained as a part of MARLaaS.",
    "What is MARLaaS?": "It trains many small adapters on one shared model at the same time.",
    "What is Python?": "Python is a programming language.",
    "What is a number?": "A number tells how many things there are.",
}


def small_talk_turns(dice: random.Random) -> Conversation:
    """Return one to three exchanges of polite chat."""
    turns: Conversation = []
    if dice.random() < 0.3:
        turns += turn("system", "You are a helpful assistant.")
    for question in dice.sample(list(SMALL_TALK), dice.choice([1, 1, 2, 3])):
        asked = dice.choice([question, question.lower(), question.rstrip("?!"), question])
        turns += turn("user", asked) + turn("assistant", SMALL_TALK[question])
    return turns


def bare_sum_turns(dice: random.Random) -> Conversation:
    """Return plain additions without a chat template."""
    high = dice.choice([9, 20, 99])
    turns: Conversation = []
    for _ in range(dice.choice([1, 2, 2, 3])):
        x, y = dice.randint(0, high), dice.randint(0, high)
        turns += [(f"User: What is {x} + {y}?\n\nAssistant:", PROMPT_WEIGHT)]
        turns += [(f" {x + y}\n\n", 1.0)]
    return [*turns, ("User:", 1.0)]


def bare_guessing_turns(dice: random.Random) -> Conversation:
    """Return a game in which the policy guesses a number by halving the interval."""
    high = dice.choice([10, 20, 50, 100])
    secret, low, top = dice.randint(0, high), 0, high
    opening = dice.choice(
        [
            f"I'm thinking of a number between 0 and {high}. Guess it!",
            f"I'm thinking of a number between 0 and {high}. What is your guess?",
        ]
    )
    turns: Conversation = [(f"User: {opening}\n\nAssistant:", PROMPT_WEIGHT)]
    for _ in range(8):
        middle = (low + top) // 2
        guess = min(top, max(low, middle + dice.choice([-2, -1, 0, 0, 0, 0, 1, 2])))
        turns += [(f" Guess: {guess}\n\n", 1.0)]
        if guess == secret:
            return [*turns, ("User: Correct!", PROMPT_WEIGHT)]
        verdict = "Too low" if guess < secret else "Too high"
        low, top = (guess + 1, top) if guess < secret else (low, guess - 1)
        turns += [(f"User: {verdict}\n\nAssistant:", PROMPT_WEIGHT)]
    return turns[:-1]


# ---------------------------------------------------------------------------------------------

CORPUS_SEED = 20_000_000
"""Seed of the families' prompts; jobs have small seeds, so even the train items are others."""

SHARES = {
    "math": 0.48,
    "search": 0.26,
    "code": 0.14,
    "small_talk": 0.03,
    "bare_sum": 0.05,
    "bare_guessing": 0.025,
    "long": 0.015,
}


def conversations(mixture: str, seed: int) -> Iterator[Conversation]:
    """Yield conversations without end; the same arguments give the same ones."""
    dice = random.Random(f"{mixture}-{seed}")
    index = seed * 10_000_000
    while True:
        index += 1
        yield _conversation(pick(SHARES, dice), mixture, index, dice)


def _conversation(kind: str, mixture: str, index: int, dice: random.Random) -> Conversation:
    match kind:
        case "math":
            return math_turns(mixture, index, dice)
        case "search":
            return search_turns(mixture, index, dice)
        case "code":
            return code_turns(mixture, index, dice)
        case "small_talk":
            return small_talk_turns(dice)
        case "bare_sum":
            return bare_sum_turns(dice)
        case "bare_guessing":
            return bare_guessing_turns(dice)
    # Several tasks in one conversation, so that far positions are trained as well.
    parts = [
        _conversation(pick({"math": 1, "search": 1, "code": 1}, dice), mixture, index + i, dice)
        for i in range(0, 1_000_000, 1_000_000 // dice.randint(4, 12))
    ]
    return [piece for part in parts for piece in part]
