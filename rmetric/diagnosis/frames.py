"""At which stage a traceback was raised, by the names of its functions."""

from __future__ import annotations

import re

_FRAME = re.compile(r"^\s*File \".{1,400}\", line \d+, in (?P<name>\S+)", re.MULTILINE)
#: Words in a function's name -> the stage; the first that fits the innermost frame that any fits.
_STAGES = (
    ("checkpoint", r"checkpoint|save_(?:model|state|pretrained|sharded)|(?:^|\.)save$"),
    ("evaluate", r"^_?(?:run_)?(?:eval|validat)\w*|_(?:eval|validat)"),
    ("load data", r"__getitem__|collate|data_?loader|dataset|load_data|_next_data"
                  r"|^_?fetch|get_batch"),
    ("initialise", r"init_process_group|initiali[sz]e|setup_(?:model|distributed)|build_model"
                   r"|from_pretrained|^_new_process_group"),
    ("compile", r"^compile|_compile|inductor|dynamo"),
)  # fmt: skip
_RULES = [(stage, re.compile(words, re.IGNORECASE)) for stage, words in _STAGES]
_TRAINS = re.compile(r"^_?(?:inner_)?train(?:ing)?(?:_(?:step|loop|batch|epoch|one_step))?$|^fit")


def stage_of(text: str) -> str:
    """The stage in which the entry's traceback was raised; "" where it does not tell.

    >>> stage_of('''Traceback (most recent call last):
    ...   File "train.py", line 9, in train
    ...   File "train.py", line 41, in save_checkpoint
    ... OSError: no space''')
    'checkpoint'
    """
    names = [frame["name"] for frame in _FRAME.finditer(text)]
    for name in reversed(names):
        for stage, words in _RULES:
            if words.search(name):
                return stage
    return "train" if any(_TRAINS.search(name) for name in names) else ""
