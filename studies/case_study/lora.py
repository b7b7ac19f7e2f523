"""Low-rank adapters: the model stays as it is, small matrices beside it are trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from studies.case_study.settings import CaseStudyError

RANK = 16
ALPHA = 32


def with_lora(model: nn.Module) -> Any:
    """`model` frozen, with adapters on all linear layers but the output's.

    No dropout, so that a run and its twin differ by the fault alone.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise CaseStudyError("LoRA needs the package peft: pip install peft") from None
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
