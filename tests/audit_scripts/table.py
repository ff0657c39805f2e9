"""What an audit has to say about each script of this folder. Plain data, no torch.

A faulty script comes twice: as it is, and with --mended, where nothing may be found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

EXACT = "exact"
EXACT_UP_TO_FACTOR = "exact-up-to-factor"
INEXACT = "inexact"

SUM_OVER_COUNT = EXACT
"""Of a sum that is divided by the count of the whole update: it declares no denominator, and has the right one."""

COEFFICIENT = EXACT_UP_TO_FACTOR
"""Of losses with coefficients, which nobody declares: each is right up to a factor of its own."""


@dataclass(frozen=True)
class Case:
    """A run of a script, and what is right to say about it."""

    file: str
    source: str = ""
    args: tuple[str, ...] = ()
    ranks: int = 1
    updates: str = "4"
    weighting: str | None = None
    """None: as the loss calls declare."""
    kinds: frozenset[str] = frozenset()
    factor: float | None = None
    """Of the finding: what is seen over what is right. None where there is no one number."""
    verdict: str = EXACT

    @property
    def name(self) -> str:
        return " ".join([self.file.removesuffix(".py"), *self.args, *([self.weighting] if self.weighting else [])])


def faulty(
    file: str,
    source: str,
    kinds: str,
    verdict: str,
    factor: float | None = None,
    *,
    ranks: int = 1,
    updates: str = "4",
    weighting: str | None = None,
    mended: str = EXACT,
) -> tuple[Case, Case]:
    """A script as it is, and mended; kinds are separated by spaces, `mended` is the verdict then."""
    case = Case(file, source, (), ranks, updates, weighting, frozenset(kinds.split()), factor, verdict)
    right = replace(case, args=("--mended",), kinds=frozenset(), factor=None, verdict=mended)
    return case, right


WEIGHTS = [
    faulty("mean_of_means_two_lengths.py", "transformers 24725", "mean-of-means", INEXACT),
    faulty("mean_of_means_loss_mask.py", "levanter 842", "mean-of-means", INEXACT, mended=SUM_OVER_COUNT),
    faulty("mean_of_replicas_local_mean.py", "transformers 34242", "mean-of-replicas", INEXACT, ranks=2),
    faulty("mean_of_means_and_replicas.py", "torchtitan 2206", "mean-of-means mean-of-replicas", INEXACT, ranks=2),
    faulty("scale_averaged_again.py", "torchtune 2172", "scale", EXACT_UP_TO_FACTOR, 1 / 2, ranks=2, weighting="token"),
    faulty("scale_divided_twice.py", "accelerate 1767", "scale", EXACT_UP_TO_FACTOR, 1 / 16),
    faulty("scale_not_divided.py", "guided-diffusion 111", "scale", EXACT_UP_TO_FACTOR, 4.0),
    faulty("scale_summed_tokens.py", "torchtitan 2972", "scale", EXACT_UP_TO_FACTOR, 16.0, weighting="token"),
    faulty("scale_summed_replicas.py", "dinov3 250", "scale", EXACT_UP_TO_FACTOR, 2.0, ranks=2),
    faulty("count_mismatch_unshifted.py", "ms-swift 9167", "count-mismatch", INEXACT, 28 / 32, weighting="token"),
    faulty("count_mismatch_masked_microbatch.py", "NeMo-RL 212", "count-mismatch", INEXACT, 3 / 4, weighting="token"),
    faulty(
        "term_scale_auxiliary_per_microbatch.py",
        "OpenNMT-py 2209",
        "term-scale",
        INEXACT,
        4.0,
        weighting="token",
    ),
    faulty(
        "term_scale_times_replicas.py", "transformers 48706", "term-scale", INEXACT, 2.0, ranks=2, weighting="token"
    ),
    faulty("partial_group_tail.py", "Lightning 19987", "partial-group", INEXACT, 3 / 4, updates="all"),
    faulty(
        "stale_gradient_tail_leaks.py",
        "torchtune 2745",
        "stale-gradient lost-microbatch",
        INEXACT,
        updates="all",
    ),
    faulty("stale_gradient_nan_kept.py", "espnet 3283", "stale-gradient", INEXACT, updates="all"),
    faulty("stale_gradient_skipped_loss.py", "espnet 3283", "stale-gradient", INEXACT, updates="all"),
    faulty("lost_microbatch_too_few.py", "AnimaLoraStudio 305", "lost-microbatch", INEXACT),
    faulty("lost_microbatch_cleared.py", "RAE 67", "lost-microbatch", INEXACT),
    faulty("unsynchronised_replicas_module.py", "icefall 226", "unsynchronised-replicas", INEXACT, ranks=2),
    faulty("duplicate_example_padding.py", "pytorch 25162", "duplicate-example", INEXACT, ranks=2, updates="all"),
    faulty("duplicate_example_own_shuffle.py", "CrowdDet 36", "duplicate-example", INEXACT, ranks=2, updates="all"),
    faulty("duplicate_example_evened.py", "accelerate 2316", "duplicate-example", INEXACT, ranks=2, updates="all"),
    faulty("uneven_weights_running_division.py", "", "uneven-weights", INEXACT),
]

AROUND = [
    faulty("scheduler_unit_microbatches.py", "accelerate 963", "scheduler-unit", EXACT, 4.0),
    faulty("scheduler_unit_ranks.py", "accelerate 1382", "scheduler-unit", EXACT, 2.0, ranks=2),
    faulty("skip_advances_scheduler_inf.py", "pytorch 55585", "skip-advances-scheduler", EXACT, updates="all"),
    faulty("clip_before_unscale_norm.py", "pytorch/examples 1196", "clip-before-unscale", INEXACT),
    faulty("clip_per_microbatch_norm.py", "transformers 986", "clip-per-microbatch", INEXACT),
    faulty(
        "scaler_disagrees_scales.py",
        "pytorch 136009",
        "scaler-disagrees",
        INEXACT,
        ranks=2,
    ),
    faulty(
        "scaler_disagrees_inf.py",
        "Megatron-Bridge 5591",
        "scaler-disagrees",
        INEXACT,
        ranks=2,
        updates="all",
    ),
    faulty("sync_every_microbatch_forward_outside.py", "accelerate 1726", "sync-every-microbatch", EXACT, 4.0, ranks=2),
    faulty("retained_graph_total_loss.py", "horovod 641", "retained-graph", EXACT),
    faulty("low_precision_sum_bfloat16.py", "pytorch 106395", "low-precision-sum", INEXACT, updates="all"),
    faulty("batchnorm_two_modes.py", "pytorch 46516", "batchnorm", EXACT),
    faulty("wrong_log_last_over_a.py", "allennlp 4706", "wrong-log", EXACT),
    faulty("wrong_log_last.py", "nanochat 52", "wrong-log", EXACT),
    faulty("no_update_copy.py", "", "no-update parameters-missing", INEXACT),
    faulty("no_update_new_head.py", "", "no-update parameters-missing", INEXACT),
    faulty("dropout_shared_seed.py", "", "dropout-shared", EXACT, ranks=2),
    faulty("parameters_missing_head.py", "", "parameters-missing", EXACT),
    faulty("parameters_missing_temperature.py", "", "parameters-missing", COEFFICIENT, mended=COEFFICIENT),
]

RIGHT = [
    Case("ok_averaged_model.py"),
    Case("ok_batchnorm_whole_batch.py"),
    Case("ok_bfloat16_autocast.py"),
    Case("ok_binary_pos_weight.py"),
    Case("ok_checkpointing.py"),
    Case("ok_checkpointing.py", args=("--reentrant",)),
    Case("ok_class_weights.py", verdict=SUM_OVER_COUNT),
    Case("ok_class_weights_batch.py"),
    Case("ok_clip_norm.py", verdict=SUM_OVER_COUNT),
    Case("ok_clip_value.py"),
    Case("ok_contrastive.py", verdict=COEFFICIENT),
    Case("ok_cosine.py", updates="all"),
    Case("ok_ctc.py"),
    Case("ok_ddp_equal.py", ranks=2),
    Case("ok_ddp_global_count.py", ranks=2, verdict=SUM_OVER_COUNT),
    Case("ok_ddp_no_sync.py", ranks=2),
    Case("ok_distillation.py", verdict=COEFFICIENT),
    Case("ok_drop_last.py", updates="all"),
    Case("ok_epoch_log.py", updates="all"),
    Case("ok_evaluation_with_graph.py", updates="all"),
    Case("ok_frozen.py"),
    Case("ok_frozen_batchnorm.py"),
    Case("ok_gan.py", updates="all"),
    Case("ok_gradient_penalty.py"),
    Case("ok_huber.py"),
    Case("ok_label_smoothing.py"),
    Case("ok_lbfgs.py"),
    Case("ok_log_softmax.py", updates="all"),
    Case("ok_manual_replicas.py", ranks=2, verdict=SUM_OVER_COUNT),
    Case("ok_masked_by_hand.py", verdict=SUM_OVER_COUNT),
    Case("ok_momentum_decay.py"),
    Case("ok_moving_average.py"),
    Case("ok_one_division_of_two.py", "accelerate 3533"),
    Case("ok_parameter_groups.py"),
    Case("ok_partial_last_group.py", updates="all"),
    Case("ok_per_example.py", "NeMo 8343", weighting="example"),
    Case("ok_plateau.py", updates="all"),
    Case("ok_regression.py", updates="all"),
    Case("ok_scaler_accumulate.py"),
    Case("ok_scaler_unscale_clip.py", updates="all"),
    Case("ok_sgd_closure.py"),
    Case("ok_sum_objective.py", verdict=EXACT_UP_TO_FACTOR),
    Case("ok_terms.py", verdict=COEFFICIENT),
    Case("ok_tied.py"),
    Case("ok_truncated_sequences.py"),
    Case("ok_two_heads.py"),
    Case("ok_two_optimizers.py", updates="all"),
    Case("ok_validation_between.py", updates="all"),
    Case("ok_warmup_from_zero.py", updates="all"),
]

CASES = [case for pair in WEIGHTS + AROUND for case in pair] + RIGHT
