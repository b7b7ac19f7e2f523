"""The bundled text: questions about small Python functions, from a seeded generator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: What is kept of a list, in words and as a condition on x; {n} is a number.
CHOICES = (
    ("all items", ""),
    ("the even numbers", " if x % 2 == 0"),
    ("the odd numbers", " if x % 2 == 1"),
    ("the numbers above {n}", " if x > {n}"),
    ("the numbers below {n}", " if x < {n}"),
    ("the multiples of {n}", " if x % {n} == 0"),
    ("the numbers other than {n}", " if x != {n}"),
)
#: What is done to each, in words and as an expression of x.
CHANGES = (
    ("", "x"),
    ("squares of ", "x * x"),
    ("doubles of ", "2 * x"),
    ("absolute values of ", "abs(x)"),
    ("remainders by {m} of ", "x % {m}"),
    ("texts of ", "str(x)"),
    ("negatives of ", "-x"),
)
#: What becomes of the result: in words, the wrapped expression, and the end of the name.
RESULTS = (
    ("the sum", "sum({} for x in {}{})", "sum"),
    ("the largest", "max({} for x in {}{})", "largest"),
    ("the smallest", "min({} for x in {}{})", "smallest"),
    ("a list", "[{} for x in {}{}]", "list"),
    ("a sorted list", "sorted({} for x in {}{})", "sorted"),
    ("the number", "len([{} for x in {}{}])", "count"),
    ("a set", "{{{} for x in {}{}}}", "set"),
)
LISTS = ("numbers", "values", "items", "scores", "ages", "prices", "row", "data")
ASKING = (
    "Write a function that returns {}.",
    "How do I get {} in Python?",
    "Give me a Python function for {}.",
    "I need {}. Show the code.",
)


def examples(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` rows with the columns instruction and output; the same for the same seed.

    >>> row = next(examples(1))
    >>> row["output"].startswith("def ")
    True
    """
    generator = np.random.default_rng(seed)
    for _ in range(count):
        kept, condition = CHOICES[generator.integers(len(CHOICES))]
        change, expression = CHANGES[generator.integers(len(CHANGES))]
        result, form, end = RESULTS[generator.integers(len(RESULTS))]
        name = LISTS[generator.integers(len(LISTS))]
        asking = ASKING[generator.integers(len(ASKING))]
        numbers = {"n": int(generator.integers(2, 100)), "m": int(generator.integers(2, 10))}
        wanted = f"{result} of the {change}{kept} in {name}".format(**numbers)
        code = form.format(expression.format(**numbers), name, condition.format(**numbers))
        yield {
            "instruction": asking.format(wanted),
            "output": f"def {end}_of_{name}({name}):\n    return {code}\n",
        }
