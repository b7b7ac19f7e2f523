"""Tracebacks: the exception, and the frame of the user's own code."""

import pytest

from rmetric.diagnosis.report.frames import raised, stage_of

LIBRARY = '  File "/opt/env/lib/python3.10/site-packages/acme/slots.py", line 40, in take'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Traceback (most recent call last):\n"
            '  File "run/plan.py", line 12, in make\n    slots.take(3)\n'
            f"{LIBRARY}\nacme.errors.SlotError: no room for 3",
            "SlotError in make (plan.py:12): no room for 3",
        ),
        (f"Traceback (most recent call last):\n{LIBRARY}\nKeyError: 'a'", "KeyError: 'a'"),
        (
            'Traceback (most recent call last):\n  File "D:\\plan.py", line 2, in <module>\n'
            "StopIteration",
            "StopIteration in <module> (plan.py:2)",
        ),
        (
            'Traceback (most recent call last):\n  File "plan.py", line 2, in read\n'
            "struct.error: too short",
            "struct.error in read (plan.py:2): too short",
        ),
        ("ERROR plan.py: PlanError: no room", "PlanError: no room"),
        ('Traceback (most recent call last):\n  File "plan.py", line 2, in read', ""),
        ("INFO all is well: Plan: made", ""),
    ],
)
def test_the_exception_and_whose_code_led_to_it(text, said):
    assert raised(text) == said


def test_of_several_exceptions_the_last_traceback_speaks():
    first = 'Traceback (most recent call last):\n  File "a.py", line 1, in a\nKeyError: 1'
    then = "\nDuring handling of the above exception, another exception occurred:\n"
    text = first + then + first.replace("KeyError: 1", "PlanError: two").replace("a.py", "b.py")
    assert raised(text) == "PlanError in a (b.py:1): two"


def test_the_stage_is_that_of_the_innermost_frame_that_has_one():
    text = '  File "a.py", line 1, in train\n  File "a.py", line 9, in save_checkpoint\nX: y'
    assert stage_of(text) == "checkpoint"


def test_a_file_of_a_data_set_tells_the_stage_and_a_folder_does_not():
    frame = '  File "/datasets/{}", line 1, in check\nX: y'
    assert stage_of(frame.format("run/streaming/dataset.py")) == "load data"
    assert stage_of(frame.format("run/model.py")) == ""
    assert stage_of(frame.format("train_dataloader.py").replace("check", "<module>")) == ""


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        ("validate", "evaluate"),
        ("_run_validate", "evaluate"),
        ("validation_step", "evaluate"),
        ("validate_epoch", "evaluate"),
        ("evaluate_and_print_results", "evaluate"),
        ("validate_result", ""),
        ("_validate_args", ""),
    ],
)
def test_a_check_of_values_is_no_evaluation_of_a_model(function: str, stage: str) -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line 3, in {function}\nKeyError: 1'
    assert stage_of(text) == stage


def test_the_stage_of_a_chain_is_that_of_its_first_exception():
    frame = '  File "a.py", line 1, in {}\n'
    first, then = frame.format("training_step") + "X: y\n", frame.format("teardown") + "Z: w"
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert stage_of(first + chain + then) == "train"
    assert stage_of(frame.format("main") + "X: y\n" + chain + then) == "tear-down"
