"""Conversion from and to Hugging Face folders, with one tensor in memory at a time."""

import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.files import check_no_model_files
from megatron5d.checkpoint.hf.import_config import read_hf_config
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder, save_folder
from megatron5d.checkpoint.hf.tensor_table import IGNORED, hf_entries
from megatron5d.checkpoint.hf.weights import (
    folder_model,
    folder_notes,
    hf_weights,
    prediction_layers,
)
from megatron5d.checkpoint.layout import LazyTensor
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.tools.conversion.new_checkpoint import (
    print_written,
    save_weights,
    stored_dtype,
    writes_checkpoint,
)
from megatron5d.topology.owned_output import staged
from megatron5d.train.hf_export import has_tokenizer, plan_export
from megatron5d.train.preflight.resume import tokenizer_differences
from megatron5d.train.state import read_record


@writes_checkpoint
def from_hf(args: Namespace) -> None:
    """Writes a checkpoint of step 0, and prints its folder.

    Raises:
        ValueError: the folder cannot be read, or `out` has checkpoints.
    """
    model = folder_model(args.hf)
    with SafetensorsFolder(args.hf) as stored:
        if args.mtp:
            model = replace(model, num_mtp_layers=len(prediction_layers(model, stored)))
        config, tensors = imported(model, stored, args.dtype)
        folder = save_weights(args.out, dict(tensors), config)
    print_written(folder, config, str(args.hf), None)


def imported(
    model: ModelConfig, stored: SafetensorsFolder, dtype: str | None = None
) -> tuple[Config, dict[str, LazyTensor]]:
    """Configuration and weights of an open Hugging Face folder, as a checkpoint has them; prints
    what the model does not use of it.

    Args:
        model: of the folder (`folder_model`).
        dtype: of the weights; None = the narrowest that holds them.

    Raises:
        ValueError: the folder's tensors are not those of the model.
    """
    hf = stored.folder
    source = str(hf.resolve())
    family = read_hf_config(hf)["model_type"]
    # rotary frequencies, which IGNORED names, are fp32 even among weights in bf16
    dtype = dtype or stored_dtype(stored.tensors, hf_entries(model, family), IGNORED[family])
    for note in folder_notes(model, stored):
        print(note, file=sys.stderr)
    config = Config(
        model=replace(model, from_hf=source),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(tokenizer=source if has_tokenizer(hf) else None),
    )
    return config, hf_weights(model, stored, DTYPES[dtype])


def to_hf(args: Namespace) -> None:
    """Writes a Hugging Face folder, and prints the size of its weights.

    Raises:
        ValueError: there is no complete checkpoint, no family computes its architecture, its
            tokenizer would give other ids, or `out` has files that transformers would read.
    """
    folder = resolve_checkpoint(args.checkpoint, "--checkpoint")
    run, config = read_record(folder), saved_config(folder)
    if args.tokenizer:
        with_tokenizer = replace(config, data=DataConfig(tokenizer=str(args.tokenizer)))
        for line in tokenizer_differences(with_tokenizer, config):
            print(f"{folder}: {line}", file=sys.stderr)
    # files appear together at the end, so that no half-written folder is loaded
    with staged(args.out, check_no_model_files) as staging:
        export = plan_export(
            config,
            partial(print, file=sys.stderr),
            dtype=args.dtype,
            tokenizer=args.tokenizer,
            with_tokenizer=not args.no_tokenizer,
            trained=run["progress"]["step"] > 0,
        )
        bar = tqdm(export.entries, unit="tensor", disable=None)
        size = save_folder(staging, export.tensors(folder, bar), round(args.max_shard_gb * 1e9))
        export.write_files(staging)
    print(f"read {folder}, wrote {size:,} bytes of weights to {args.out}")
    print(f"next: lm_eval --model hf --model_args pretrained={args.out} --tasks hellaswag")
