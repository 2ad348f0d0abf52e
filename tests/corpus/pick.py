"""Copies the committed selection out of a folder of producers' graphs: python tests/corpus/pick.py FOLDER."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

SELECTION = {
    "torch_export_fb": [
        *("ce_mean_f32", "ce_mean_smooth_weight_ignore_input_dyn", "ce_seg_nchw_ignore255_dyn", "ce_prob_targets"),
        *("ce_none_weighted", "ce_mean_bf16", "attn_maskedfill_f16_dyn", "attn_mulmask", "attn_additive_f32"),
        *(
            "gpt_block_ce_dyn",
            "gba_2d_ends_cmp_dyn",
            "gba_2d_static_split",
            "gba_3d_gh",
            "gba_2d_index",
            "mse_mean_f16",
        ),
        *("mse_handwritten_pow_dyn", "mse_sum_f32"),
    ],
    "torch_makefx": [
        *("ce_mean_weight_ignore_inductor", "ce_mean_f32_core_noopt", "ce_mean_smooth", "ce_zloss_core"),
        *("sgd_step_ce_mean_f32", "attn_maskedfill_f32_noopt", "attn_dropout", "gba_2d_embedding"),
    ],
    "torch_aot": ["ce_mean_ignore", "attn_nomask"],
    "torch_ops": ["mse_loss_backward_mean", "mse_loss_backward_none", "mse_loss_backward_sum"],
    "jax2onnx_gemmfix": ["ce_onehot_smooth", "attn_where_f16", "mse_square_mean_dyn", "gba_3d_keep"],
    "onnx_ad": ["mse_handwritten_square", "gba_2d_gather"],
}


def main(source: Path) -> None:
    target = Path(__file__).parent
    with (source / "index.csv").open() as file:
        rows = list(csv.DictReader(file))
    picked = [r for r in rows if r["case"] in SELECTION.get(r["producer"], [])]
    for row in picked:
        (target / row["producer"]).mkdir(exist_ok=True)
        for suffix in (".onnx", ".npz"):
            shutil.copyfile(*(folder / row["producer"] / (row["case"] + suffix) for folder in (source, target)))
    with (target / "index.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "note": ""} for row in picked)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
