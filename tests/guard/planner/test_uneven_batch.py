"""A batch that the copies do not divide: shares, weights, and the gradient of real ranks."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.cli import supervise
from rmetric.guard.batch_share import batch_share
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, PlanOptions, check, plan
from rmetric.guard.planner.cluster import Cluster
from rmetric.guard.planner.search import idle_hints
from rmetric.guard.supervisor.allocation import ShrinkData, by_model
from tests.guard.planner.test_planner import LLAMA_8B, LLAMA_70B
from tests.guard.supervisor import options_of


@st.composite
def batches(draw):
    batch = draw(st.integers(1, 3000))
    return batch, draw(st.integers(1, min(batch, 1100))), draw(st.integers(1, 40))


@given(batches())
def test_shares_and_their_micro_batches_are_a_partition_with_the_weights_of_the_mean(case):
    batch, copies, at_most = case
    shares = [batch_share(batch, copies, copy) for copy in range(copies)]
    sizes = [share.samples for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert {share.most for share in shares} == {max(sizes)}
    assert sum(share.weight for share in shares) == pytest.approx(copies)
    expected = 0
    for share in shares:
        assert share.first == expected
        parts = share.micro_batches(at_most)
        assert len(parts) == -(-share.most // at_most)
        assert all(1 <= part.samples <= at_most for part in parts)
        counted = [part for part in parts if part.weight]
        for part in counted:
            assert part.first == expected
            # The mean over the copies gives each sample the weight 1 / batch.
            assert part.weight / part.samples / copies == pytest.approx(1 / batch)
            expected += part.samples
        for filler in set(parts) - set(counted):
            assert (filler.first, filler.samples) == (share.first, 1)
    assert expected == batch


def test_a_layout_states_a_batch_that_its_copies_do_not_divide():
    layout = Layout(data=7, micro_batch=4, accumulation=37, samples=1024)
    assert layout.fullest_copy == 147
    assert str(layout).endswith("DP7, batch 1024 = 7 x 146 or 147 in micro-batches of at most 4")


@given(batches())
def test_a_split_layout_is_that_of_its_batch(case):
    batch, data, micro_batch = case
    layout = Layout.split(batch, data=data, micro_batch=micro_batch)
    assert layout.global_batch == batch
    assert layout.accumulation == len(batch_share(batch, data, 0).micro_batches(micro_batch))
    assert Layout.from_json(layout.as_json()) == layout
    even = batch % (data * micro_batch) == 0
    assert (layout.samples is None) == even
    assert ("samples" in layout.as_json()) != even


def gpus(count: int) -> dict[str, tuple[int, ...]]:
    return {"": tuple(range(count))}


@pytest.mark.parametrize(
    ("survivors", "batch", "micro_batch"),
    [(7, 1024, 1), (7, 256, 4), (63, 1024, 2), (511, 2048, 1), (1023, 2048, 1)],
)
def test_an_uneven_batch_keeps_all_survivors_at_work(survivors, batch, micro_batch):
    first = Layout.split(batch, data=survivors + 1, micro_batch=micro_batch)
    found = ShrinkData(first, batch, uneven_batch=True)(gpus(survivors), first)
    assert found.layout.data == survivors
    assert found.layout.global_batch == batch
    even = ShrinkData(first, batch)(gpus(survivors), first)
    assert even.layout.global_batch == batch
    assert even.layout.data < 0.6 * survivors
    assert "--uneven-batch (the training splits it by rmetric.guard.batch_share)" in even.words
    changed = ShrinkData(first, batch, largest_change=0.1)(gpus(survivors), first)
    assert changed.layout.data >= 0.95 * survivors
    assert abs(changed.layout.global_batch / batch - 1) <= 0.1
    assert f"the batch becomes {changed.layout.global_batch} instead of {batch}" in changed.words
    assert "learning rate" in changed.words


def test_the_slowest_copy_decides_whether_more_copies_are_of_use():
    """64 samples on 63 copies: one has two, as on 32 copies."""
    first = Layout(data=64)
    kept = ShrinkData(first, 64, uneven_batch=True)(gpus(63), first)
    assert kept.layout == Layout.split(64, data=63)
    both = ShrinkData(first, 64, uneven_batch=True, largest_change=0.1)(gpus(63), first)
    assert both.layout == Layout(data=63)
    # Where next to nothing is won the batch stays.
    stays = ShrinkData(first, 1024, uneven_batch=True, largest_change=0.1)(gpus(7), first)
    assert stays.layout.global_batch == 1024


@given(
    st.integers(1, 300), st.integers(1, 4), st.integers(1, 40), st.booleans(),
    st.sampled_from([0.0, 0.05, 0.3]),
)  # fmt: skip
def test_the_batch_is_only_changed_when_and_as_far_as_that_is_allowed(
    batch, micro_batch, survivors, uneven, change
):
    first = Layout(data=40, micro_batch=micro_batch)
    try:
        plan = ShrinkData(first, batch, uneven_batch=uneven, largest_change=change)
    except ValueError:
        assert not uneven
        assert batch % micro_batch
        return
    layout = plan(gpus(survivors), first).layout
    assert abs(layout.global_batch - batch) <= change * batch
    assert layout.data <= survivors
    assert uneven or layout.samples is None


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "fsdp"])
@pytest.mark.parametrize(
    ("model", "sizes", "batch"),
    [
        (LLAMA_8B, [7], 1024),
        (LLAMA_8B, [8] * 7 + [7], 64),
        (LLAMA_8B, [8] * 7 + [7], 1024),
        (LLAMA_70B, [8] * 127 + [7], 2048),
    ],
)
def test_a_plan_uses_nearly_all_survivors_or_says_so_and_what_would(engine, model, sizes, batch):
    cluster = Cluster.of(sizes, "h100")
    kept = BatchSpec(samples=batch)
    best = plan(model, cluster, kept, engine=engine).best
    assert best.layout.global_batch == batch
    if best.layout.num_gpus < 0.95 * cluster.num_gpus:
        assert any("GPUs stay idle" in remark for remark in best.remarks)
    for hint in idle_hints(best):
        flag, layout = re.fullmatch(r"(--\S+): (.*), [\d,]+ of [\d,]+ GPUs, \+.*%", hint).groups()
        change = 0.1 if flag == "--allow-batch-change" else 0.0
        loose = replace(kept, largest_change=change)
        uneven = {} if change else {flag[2:].replace("-", "_"): True}
        options = PlanOptions(**uneven)
        other = plan(model, cluster, loose, engine=engine, options=options).best
        assert str(other.layout) == layout
        assert other.gain(best) >= 0.02


def test_a_layout_by_the_shape_of_the_model_uses_the_survivors_too():
    seven = gpus(7)
    options = {"model": LLAMA_8B, "gpu": Cluster.of([1], "h100").gpu, "engine": "torchtitan"}
    even = by_model(**options, batch=BatchSpec(samples=1024))(seven, None)
    assert even.layout.num_gpus <= 4
    assert "--allow-batch-change: TP" in even.words
    assert "--uneven-batch: " in even.words
    assert "--uneven-stages" not in even.words  # supervise has no such option
    refused = check(
        LLAMA_8B, Cluster.of([7], "h100"), BatchSpec(samples=1024), Layout.split(1024, data=7)
    )
    assert "megatron gives each copy the same micro-batches" in refused[0]
    uneven = by_model(**options, batch=BatchSpec(samples=1024), uneven_batch=True)(seven, None)
    assert uneven.layout == Layout.split(1024, data=7)
    # FSDP2 could split the batch, but nothing states that this training does.
    own_loop = by_model(**options | {"engine": "fsdp"}, batch=BatchSpec(samples=1024))(seven, None)
    assert own_loop.layout.samples is None


@pytest.mark.parametrize(
    ("more", "filled", "reason"),
    [
        ([], ["4", "256", "1024", "1"], "would use all 7"),
        (["--uneven-batch"], ["7", "147", "1024", "1"], "the batch of 1024 is kept"),
        (["--allow-batch-change"], ["7", "146", "1022", "1"], "the batch becomes 1022 instead of"),
    ],
)
def test_supervise_starts_on_seven_gpus_with_a_batch_of_1024(tmp_path, more, filled, reason):
    words = ["{data}", "{accumulation}", "{batch}", "{micro_batch}"]
    options = ("--gpus", "0-6", "--batch", "1024", *more, "--", "train.py", *words)
    supervisor = supervise._supervisor(options_of(tmp_path, *options))
    found = supervisor.plan(supervisor.pool, None)
    assert supervisor.program.commands(found, 29500) == {"": ["train.py", *filled]}
    assert reason in found.words
    assert ("would use all 7" in found.words) == (not more)
