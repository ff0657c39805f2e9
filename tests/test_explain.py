"""The small models of `isostep explain`: their golden numbers, and what the command does with bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isostep import cli
from isostep.errors import InputError
from isostep.explain.batch import batch_sizes, epoch_of
from isostep.explain.replicas import average_step, replica_update, vector_update
from isostep.explain.tokens import LoopResult, TokenWeights, token_weights

EXACT, MEAN_OF_MEANS, MEAN_OF_REPLICAS, A_FORGOTTEN, D_TWICE, NEVER_DIVIDED = range(6)

token_counts = (
    st.integers(1, 4)
    .flatmap(
        lambda microbatches: st.lists(
            st.lists(st.integers(0, 50), min_size=microbatches, max_size=microbatches), min_size=1, max_size=4
        )
    )
    .filter(lambda counts: any(map(any, counts)))
)
target_groups = st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=1, max_size=5).filter(any)


def weights_of(loop: LoopResult) -> list[Fraction]:
    return [weight for row in loop.token_weights for weight in row if weight is not None]


def loop_of(tokens: list[list[int]], index: int, losses: list[list[float]] | None = None) -> LoopResult:
    return token_weights(tokens, losses).loops[index]


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- replicas


def test_three_replicas_make_one_common_update() -> None:
    update = replica_update([[0], [2], [4]], w=1, lr=0.1)
    assert [replica.w_alone for replica in update.replicas] == pytest.approx([0.9, 1.1, 1.3], abs=1e-15)
    assert update.exact.gradient == -1
    assert update.exact.w_after == pytest.approx(1.1, abs=1e-15)
    assert update.mean_of_means == update.exact


def test_unequal_portions_show_the_fault_of_averaging_means() -> None:
    update = replica_update([[0], [2], [4]], portions=[1, 1, 4])
    assert update.replicas[2].targets == (4, 4, 4, 4)
    assert [replica.gradient_sum for replica in update.replicas] == [1, -1, -12]
    assert [replica.gradient_mean for replica in update.replicas] == [1, -1, -3]
    assert (update.exact.gradient, update.mean_of_means.gradient) == (-2, -1)
    assert update.exact.w_after == pytest.approx(1.2, abs=1e-15)
    assert update.exact.example_weights == (Fraction(1, 6),) * 3
    assert update.mean_of_means.example_weights == (Fraction(1, 3), Fraction(1, 3), Fraction(1, 12))


def test_replica_without_examples_does_not_move_alone_and_joins_the_update() -> None:
    update = replica_update([[0], [2]], portions=[1, 0])
    assert update.replicas[1].gradient_mean is None
    assert update.replicas[1].w_alone == 1
    assert update.exact.gradient == 1
    assert update.mean_of_means.gradient == 0.5
    assert update.exact.example_weights == (1, None)


@given(target_groups)
def test_exact_gradient_is_that_of_all_examples_on_one_replica(targets: list[list[float]]) -> None:
    split = replica_update(targets)
    whole = replica_update([[y for replica in targets for y in replica]])
    assert split.exact.gradient == pytest.approx(whole.exact.gradient, rel=1e-12, abs=1e-12)
    assert (
        sum(
            len(replica.targets) * (weight or 0)
            for replica, weight in zip(split.replicas, split.exact.example_weights, strict=True)
        )
        == 1
    )
    assert set(split.exact.example_weights) - {None} == {Fraction(1, split.examples)}


def test_average_step_of_two_vectors() -> None:
    assert average_step([5, 5], [[1, 3], [3, 1]], lr=0.1) == pytest.approx((4.8, 4.8), abs=1e-15)
    update = vector_update([5, 5], [[1, 3], [3, 1]])
    assert update.gradient == (2, 2)
    assert update.weights_alone[0] == pytest.approx((4.9, 4.7), abs=1e-15)


# ---- tokens


def test_mean_of_means_is_three_where_the_loss_is_three_and_a_half() -> None:
    weights = token_weights([[512, 1536]], [[2, 4]])
    assert [loop.loss for loop in weights.loops] == [3.5, 3, 3.5, 6, 3.5, 7168]
    assert [loop.verdict for loop in weights.loops] == [
        "exact", "uneven", "exact", "uneven", "exact", "scaled",
    ]  # fmt: skip
    assert weights.loops[MEAN_OF_MEANS].heaviest_to_lightest == 3


@pytest.mark.parametrize(
    ("tokens", "index", "expected"),
    [
        ([[10, 100]], EXACT, ["1/110", "1/110"]),
        ([[10, 100]], MEAN_OF_MEANS, ["1/20", "1/200"]),
        ([[1], [7]], EXACT, ["1/8", "1/8"]),
        ([[1], [7]], MEAN_OF_REPLICAS, ["1/2", "1/14"]),
        ([[1, 7], [3, 5]], EXACT, ["1/16"] * 4),
        ([[1, 7], [3, 5]], MEAN_OF_MEANS, ["1/4", "1/28", "1/12", "1/20"]),
        ([[1, 7], [3, 5]], A_FORGOTTEN, ["1/2", "1/14", "1/6", "1/10"]),
        ([[1, 7], [3, 5]], D_TWICE, ["1/32"] * 4),
        ([[1, 7], [3, 5]], NEVER_DIVIDED, ["1"] * 4),
    ],
)
def test_token_weights(tokens: list[list[int]], index: int, expected: list[str]) -> None:
    assert weights_of(loop_of(tokens, index)) == [Fraction(text) for text in expected]


def test_mean_over_no_token_is_nan_and_other_loops_are_not() -> None:
    weights = token_weights([[0, 4], [3, 5]], [[0, 1], [1, 1]])
    assert [loop.loss_is_nan for loop in weights.loops] == [False, True, False, True, False, False]
    assert [loop.loss for loop in weights.loops] == [1, None, 1, None, 0.5, 12]
    assert all(loop.token_weights[0][0] is None for loop in weights.loops)
    assert weights.loops[MEAN_OF_MEANS].weight_sum == Fraction(3, 4)
    assert loop_of([[0, 0], [3, 5]], MEAN_OF_REPLICAS).loss_is_nan


@given(token_counts)
def test_exact_weights_are_all_one_over_n_and_sum_to_one(tokens: list[list[int]]) -> None:
    loop = loop_of(tokens, EXACT)
    assert set(weights_of(loop)) == {Fraction(1, sum(map(sum, tokens)))}
    assert loop.weight_sum == 1
    assert loop.verdict == "exact"
    assert not loop.loss_is_nan


@given(token_counts)
def test_loops_differ_from_each_other_by_known_factors(tokens: list[list[int]]) -> None:
    weights: TokenWeights = token_weights(tokens)
    replicas, microbatches, total = len(tokens), len(tokens[0]), sum(map(sum, tokens))
    sums = [loop.weight_sum for loop in weights.loops]
    assert sums[A_FORGOTTEN] == microbatches * sums[MEAN_OF_MEANS]
    assert sums[D_TWICE] == Fraction(1, replicas)
    assert sums[NEVER_DIVIDED] == total
    for loop in weights.loops:
        uniform = len(set(weights_of(loop))) == 1
        assert uniform == (loop.verdict != "uneven") == (loop.heaviest_to_lightest == 1)


# ---- batch


def test_batch_sizes_multiply() -> None:
    sizes = batch_sizes(2, 8, 2, stages=2, slices=3, context_length=100)
    assert (sizes.examples_per_replica, sizes.examples_per_update) == (16, 32)
    assert (sizes.tokens_per_microbatch, sizes.tokens_per_replica, sizes.tokens_per_update) == (
        200,
        1600,
        3200,
    )
    assert (sizes.ranks_per_replica, sizes.world_size) == (6, 12)
    assert sizes.world_size_fault.factor == 6
    assert sizes.world_size_fault.examples_per_update_believed == 192


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_is_in_one_place_of_the_grid(replicas: int, stages: int, slices: int) -> None:
    sizes = batch_sizes(1, 1, replicas, stages, slices)
    ranks = [rank for d in range(replicas) for p in range(stages) for rank in sizes.ranks(d, p)]
    assert ranks == list(range(sizes.world_size))


@given(st.integers(1, 500), st.integers(1, 50))
def test_epoch_accounts_for_every_example(examples: int, per_update: int) -> None:
    keep, drop = epoch_of(examples, per_update, "keep"), epoch_of(examples, per_update, "drop")
    assert keep.examples_dropped == 0
    assert (keep.updates - 1) * per_update + keep.examples_in_last_update == examples
    assert drop.updates * per_update + drop.examples_dropped == examples
    assert keep.updates - drop.updates == (examples % per_update > 0)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["replicas"], ["w = 0.9", "w = 1.3", "sum -3 over 3 examples = -1", "w = 1.1"]),
        (["replicas", "--portions", "1,1,4"], ["y = 4 (x4)", "sum -12 over 6 examples = -2", "1/12"]),
        (["replicas", "--portions", "1", "0", "4"], ["no example", "does not move"]),
        (["replicas", "--targets=-1,2", "--w", "-1"], ["y = -1, 2"]),
        (["replicas", "--targets", "1 2 3 4 5 6"], ["... and 2 replicas more, not drawn"]),
        (["replicas", "--gradients", "1,3 3,1", "--weights", "5,5"], ["[4.8, 4.8]", "average [2, 2]"]),
        (["tokens"], ["3.5", "7168", "1/2048", "loop 3 and 5"]),
        (["tokens", "--counts", "1,7 3,5"], ["1/16", "1/28", "verdict"]),
        (["tokens", "--counts", "1,7", "3,5"], ["1/16", "1/28", "verdict"]),
        (["tokens", "--counts", "0,7"], ["NaN", "a mean over no token"]),
        (["tokens", "--counts", "1,2,3,4,5,6,7,8,9,10"], ["... and 2 more"]),
        (["batch"], ["m x A x D = 2 x 8 x 2", "= 4 ranks, 2 per replica", "64"]),
        (["batch", "--context-length", "2048"], ["65,536"]),
        (["batch", "--examples", "100"], ["An epoch of 100 examples is 4 updates, the last of 4 examples."]),
        (["batch", "--examples", "9", "--last-group", "drop"], ["is 0 updates; 9 examples dropped"]),
        (["batch", "--stages", "1"], ["Every rank is a replica here"]),
        (["batch", "--slices", "4"], ["ranks 12-15"]),
    ],
)
def test_drawing_fits_80_columns(
    arguments: list[str],
    shown: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = explain(capsys, *arguments)
    assert (code, err) == (0, "")
    assert [text for text in shown if text not in out] == []
    assert [line for line in out.splitlines() if len(line.rstrip()) > 80] == []
    assert "Not shown: speed, quality, optimizer state" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "TOPIC"),
        (["bogus"], "bogus"),
        (["replicas", "--targets", ""], "targets"),
        (["replicas", "--targets", "1,,2"], "targets"),
        (["replicas", "--targets", "nan"], "nan"),
        (["replicas", "--targets", "1e400"], "inf"),
        (["replicas", "--w", "x"], "w"),
        (["replicas", "--lr", "0"], "lr"),
        (["replicas", "--lr", "nan"], "lr"),
        (["replicas", "--lr=-1"], "lr"),
        (["replicas", "--portions", "1,1"], "portions"),
        (["replicas", "--portions", "1,1,-4"], "-4"),
        (["replicas", "--portions", "0,0,0"], "0 examples"),
        (["replicas", "--portions", "1,1,999999999"], "1000000001"),
        (["replicas", "--portions", "1,1,1.5"], "1.5"),
        (["replicas", "--targets", "1,2 3", "--portions", "1,1"], "portions"),
        (["replicas", "--gradients", "1,2"], "--weights"),
        (["replicas", "--weights", "1,2"], "--gradients"),
        (["replicas", "--gradients", "1,2 3", "--weights", "1,2"], "gradients"),
        (["replicas", "--gradients", "1", "--weights", "1", "--targets", "2"], "--targets"),
        (["tokens", "--counts", "0,0"], "counts"),
        (["tokens", "--counts", "1,2 3"], "counts"),
        (["tokens", "--counts", "1,-1"], "-1"),
        (["tokens", "--counts", "9" * 5000], "counts"),
        (["tokens", "--counts", "9" * 20], "9" * 20),
        (["tokens", "--counts", "1,2", "--losses", "1"], "losses"),
        (["tokens", "--counts", "1 2", "--losses", "1,2"], "losses"),
        (["tokens", "--losses", "nan,1"], "losses"),
        (["batch", "--replicas", "0"], "--replicas"),
        (["batch", "--accumulate=-1"], "--accumulate"),
        (["batch", "--stages", "9" * 20], "stages"),
        (["batch", "--examples-per-microbatch", "1.5"], "1.5"),
        (["batch", "--last-group", "pad"], "pad"),
        (["batch", "--json", "/nowhere/file.json"], "/nowhere/file.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("isostep")
    assert named in err
    assert len(err) < 300


@pytest.mark.parametrize(
    ("topic", "path", "expected"),
    [
        ("replicas", ["exact", "example_weights", 0], 1 / 3),
        ("tokens", ["loops", MEAN_OF_MEANS, "ratios", 0, 0], 2.0),
        ("batch", ["examples_per_update"], 32),
    ],
)
def test_json_alone_on_stdout_and_the_same_in_a_file(
    topic: str, path: list[Any], expected: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = explain(capsys, topic, "--json", "-")
    document = json.loads(out)
    assert (code, document["schema"], document["explain"]) == (0, 1, topic)
    file = tmp_path / "explain.json"
    _, drawn, _ = explain(capsys, topic, "--json", str(file))
    assert "Not shown" in drawn
    assert json.loads(file.read_text(encoding="utf-8")) == document
    value: Any = document
    for key in path:
        value = value[key]
    assert value == expected


@pytest.mark.parametrize("topic", ["replicas", "tokens", "batch"])
def test_help_has_an_example(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capsys, topic, "--help")
    assert code == 0
    assert f"  isostep explain {topic}" in out


def test_models_refuse_what_the_command_cannot_express() -> None:
    with pytest.raises(InputError, match="counts"):
        token_weights([])
    with pytest.raises(InputError, match="targets"):
        replica_update([[], [1.0]], portions=[2, 1])
    with pytest.raises(InputError, match="gradients"):
        average_step([], [], lr=0.1)


def test_explain_needs_no_torch_and_draws_in_plain_ascii() -> None:
    script = (
        "import sys; from isostep import cli; from isostep.explain import draw, replicas, tokens, batch\n"
        "codes = [cli.main(['explain', topic]) for topic in ('replicas', 'tokens', 'batch')]\n"
        "assert codes == [0, 0, 0] and 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.isascii()
