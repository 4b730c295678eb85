"""Published training runs, typed in with their sources: what chapter 16 predicts.

Facts of tables that others printed, in the columns of `published`. Nothing in this
package was fitted on them, with three exceptions: the 1F1B rows of `zb-t4` gave three
residuals, the ZeRO-3 rows of `sc21-t2` the rule of one network card, and single stages
of the runs of `vocabpp`, which its authors timed too, four residuals.
"""
# ruff: noqa: E501 (tables)

from __future__ import annotations

from dataclasses import dataclass

from minitrain.simulate.names import COLUMNS


@dataclass(frozen=True)
class RunTable:
    """A published table.

    Attributes:
        source_id: Short name.
        citation: Where it was printed.
        common: Columns in which all rows agree, `name=value` between semicolons.
        text: The other columns, a line of names and one for each row; `-` for nothing.
    """

    source_id: str
    citation: str
    common: str
    text: str


SHORT = {
    "sp": "sequence_parallel",
    "v": "interleave_v",
    "b": "micro_batch",
    "batch": "global_batch",
    "gpus": "n_gpus",
    "seq": "seq_len",
    "again": "recompute",
}
"""Names of columns in the tables below, and in `COLUMNS`."""


def published_runs(*sources: str) -> list[dict[str, str]]:
    """Rows of the tables, as `validate` takes them.

    Args:
        sources: Short names; all of them if none is given.

    Raises:
        ValueError: There is no such source.
    """
    known = {table.source_id: table for table in TABLES}
    if unknown := set(sources) - set(known):
        raise ValueError(f"no source {sorted(unknown)}: there is {', '.join(known)}")
    chosen = [known[name] for name in sources] or list(TABLES)
    return [row for table in chosen for row in _rows(table)]


def _rows(table: RunTable) -> list[dict[str, str]]:
    pairs = " ".join(table.common.split()).split("; ")
    shared = dict.fromkeys(COLUMNS, "") | dict(pair.split("=", 1) for pair in pairs)
    shared |= {"source_id": table.source_id, "table_figure": table.citation}
    shared |= {"quality": "A", "ep": "1"}
    lines = [line.split() for line in table.text.strip().splitlines()]
    if not lines:
        return [shared]
    names = [SHORT.get(name, name) for name in lines[0]]
    return [
        shared
        | {
            name: "" if word == "-" else word.replace("_", " ")
            for name, word in zip(names, words, strict=True)
        }
        for words in lines[1:]
    ]


TABLES = (
    RunTable(
        "korthikanti-t5",
        "Korthikanti et al. 2022 (arXiv:2205.05198), table 5",
        """
        vocab=51200; seq_len=2048; precision=fp16; gpu=A100-SXM4-80G;
        interconnect=8x HDR 200 Gb/s; tp=8; zero_stage=0;
        measured_quantity=step_time_s; framework=Megatron-LM; source=arXiv
        2205.05198
        """,
        """
           model layers hidden heads gpus pp dp sp v    schedule b batch     again value
         GPT-22B     48   6144    64    8  1  1  n 1        none 4     4      full  1.42
         GPT-22B     48   6144    64    8  1  1  y 1        none 4     4 selective   1.1
        GPT-175B     96  12288    96   64  8  1  n 3 interleaved 1    64      full 18.13
        GPT-175B     96  12288    96   64  8  1  y 3 interleaved 1    64 selective 13.75
        GPT-530B    105  20480   128  280 35  1  n 3 interleaved 1   280      full 49.05
        GPT-530B    105  20480   128  280 35  1  y 3 interleaved 1   280 selective 37.83
          GPT-1T    128  25600   160  512 64  1  n 1        1f1b 1   512      full 94.42
          GPT-1T    128  25600   160  512 64  1  y 1        1f1b 1   512 selective 71.49
        GPT-530B    105  20480   128 2240 35  8  y 3 interleaved 1  2240 selective 39.15
        """,
    ),
    RunTable(
        "sc21-t1",
        "Narayanan et al. 2021 (arXiv:2104.04473), table 1",
        """
        vocab=51200; seq_len=2048; precision=fp16; gpu=A100-SXM4-80G;
        interconnect=8x HDR 200 Gb/s; sequence_parallel=n; zero_stage=0;
        recompute=full; measured_quantity=TFLOP/s per GPU;
        framework=Megatron-LM; source=arXiv 2104.04473; note=counts recompute
        """,
        """
              model layers hidden heads gpus tp pp dp    schedule batch value
           GPT-1.7B     24   2304    24   32  1  1 32        none   512   137
           GPT-3.6B     30   3072    32   64  2  1 32        none   512   138
           GPT-7.5B     36   4096    32  128  4  1 32        none   512   142
          GPT-18.4B     40   6144    48  256  8  1 32        none  1024   135
          GPT-39.1B     48   8192    64  512  8  2 32 interleaved  1536   138
          GPT-76.1B     60  10240    80 1024  8  4 32 interleaved  1792   140
         GPT-145.6B     80  12288    96 1536  8  8 24 interleaved  2304   148
         GPT-310.1B     96  16384   128 1920  8 16 15 interleaved  2160   155
         GPT-529.6B    105  20480   128 2520  8 35  9 interleaved  2520   163
        GPT-1008.0B    128  25600   160 3072  8 64  6 interleaved  3072   163
        """,
    ),
    RunTable(
        "sc21-t2",
        "Narayanan et al. 2021 (arXiv:2104.04473), table 2",
        """
        vocab=51200; seq_len=2048; precision=fp16; gpu=A100-SXM4-80G;
        interconnect=8x HDR 200 Gb/s; sequence_parallel=n; recompute=full;
        measured_quantity=TFLOP/s per GPU; source=arXiv 2104.04473; note=counts
        recompute
        """,
        """
             model layers hidden heads gpus tp pp   dp v    schedule zero_stage b batch value   framework
        GPT-174.6B     96  12288    96  384  1  1  384 1        none          3 4  1536   144   DeepSpeed
        GPT-174.6B     96  12288    96  768  1  1  768 1        none          3 2  1536    88   DeepSpeed
        GPT-174.6B     96  12288    96 1536  1  1 1536 1        none          3 1  1536    44   DeepSpeed
        GPT-529.6B    105  20480   128  640  1  1  640 1        none          3 4  2560   138   DeepSpeed
        GPT-529.6B    105  20480   128 1120  1  1 1120 1        none          3 2  2240    98   DeepSpeed
        GPT-529.6B    105  20480   128 2240  1  1 2240 1        none          3 1  2240    48   DeepSpeed
        GPT-174.6B     96  12288    96  384  8 12    4 - interleaved          0 1  1536   153 Megatron-LM
        GPT-174.6B     96  12288    96  768  8 12    8 - interleaved          0 1  1536   149 Megatron-LM
        GPT-174.6B     96  12288    96 1536  8 12   16 - interleaved          0 1  1536   141 Megatron-LM
        GPT-529.6B    105  20480   128  560  8 35    2 - interleaved          0 1  2240   171 Megatron-LM
        GPT-529.6B    105  20480   128 1120  8 35    4 - interleaved          0 1  2240   167 Megatron-LM
        GPT-529.6B    105  20480   128 2240  8 35    8 - interleaved          0 1  2240   159 Megatron-LM
        """,
    ),
    RunTable(
        "mcore-h100",
        "Megatron-LM repository, README of release 0.8, weak scaling on H100",
        """
        vocab=131072; seq_len=4096; precision=bf16; gpu=H100-SXM-80G;
        interconnect=8x NDR 400 Gb/s; dp=48; zero_stage=1;
        measured_quantity=TFLOP/s per GPU; framework=Megatron-Core 0.8;
        source=README of r0.8
        """,
        """
           model layers hidden heads gpus tp pp sp    schedule batch value
        GPT-1.7B     24   2048    16   48  1  1  n        none   192 408.8
        GPT-7.1B     30   4096    32   96  2  1  y        none   192 465.9
         GPT-16B     32   6144    48  192  4  1  y        none   192 489.1
         GPT-32B     48   7168    56  384  8  1  y        none   192 459.6
         GPT-70B     84   8192    64  768  8  2  y interleaved   384 419.7
        GPT-119B     92  10240    80 1536  8  4  y interleaved   768 420.5
        GPT-177B     96  12288    96 2304  8  6  y interleaved  1152 432.8
        GPT-314B     96  16384   128 3072  8  8  y interleaved  1536 474.4
        GPT-462B    112  18432   144 6144  8 16  y interleaved  3072 459.9
        """,
    ),
    RunTable(
        "nemo2407",
        "NVIDIA NeMo, performance summary of release 24.07",
        """
        precision=fp8; gpu=H100-SXM-80G; interconnect=8x NDR 400 Gb/s;
        zero_stage=1; measured_quantity=tokens/s/GPU;
        framework=NeMo/Megatron-Core; source=NeMo performance summary 24.07
        """,
        """
                 model layers hidden heads kv_heads ffn_hidden  vocab  seq gpus tp pp dp cp sp  v    schedule b batch value
               GPT3-5B     24   4096    32       32      16384  51200 2048   64  1  1 64  1  n  1        none 4  2048 23406
              GPT3-20B     44   6144    48       48      24576  51200 2048   64  2  1 32  1  y  1        none 2   256  5851
             GPT3-175B     96  12288    96       96      49152  51200 2048  128  4  8  4  1  y  6 interleaved 1   256   716
             GPT3-175B     96  12288    96       96      49152  51200 2048  512  4  8 16  1  y  6 interleaved 2  2048   825
             Llama2-7B     32   4096    32       32      11008  32000 4096    8  1  1  8  1  n  1        none 1   128 16934
            Llama2-13B     40   5120    40       40      13824  32000 4096   16  1  4  4  1  n 10 interleaved 1   128  8715
            Llama2-70B     80   8192    64        8      28672  32000 4096   64  4  4  4  1  y 20 interleaved 1   128  1728
           Nemotron-8B     32   4096    32       32      16384 256000 4096   64  2  1 32  1  y  1        none 4   256 12507
          Nemotron-22B     40   6144    48       48      24576 256000 4096   64  2  4  8  1  y 10 interleaved 2   256  4312
        Nemotron4-340B     96  18432    96        8      73728 256000 4096  128  8  8  2  1  y 12 interleaved 1    32   326
             Llama3-8B     32   4096    32        8      14336 128256 8192    8  1  1  4  2  n  1        none 1   128 12273
            Llama3-70B     80   8192    64        8      28672 128256 8192   64  4  4  2  2  y  5 interleaved 1   128  1524
        """,
    ),
    RunTable(
        "megascale-t2",
        "Jiang et al. 2024 (arXiv:2402.15627), table 2, Megatron-LM",
        """
        model=GPT-175B; layers=96; hidden=12288; heads=128; vocab=64000;
        seq_len=2048; precision=bf16; gpu=A100-SXM4-80G; interconnect=8x 200
        Gb/s; tp=8; pp=8; sequence_parallel=y; interleave_v=6;
        schedule=1f1b-interleaved; zero_stage=1; measured_quantity=step_time_s;
        framework=Megatron-LM; source=arXiv 2402.15627
        """,
        """
         gpus  dp batch value
          256   4   768  40.0
          512   8   768  21.2
          768  12   768  15.2
         1024  16   768  11.9
         3072  48  6144 29.02
         6144  96  6144 14.78
         8192 128  6144 12.24
        12288 192  6144  8.57
        """,
    ),
    RunTable(
        "mtnlg",
        "Smith et al. 2022 (arXiv:2201.11990), section 4",
        """
        model=MT-NLG-530B; layers=105; hidden=20480; heads=128; vocab=51200;
        seq_len=2048; precision=bf16; gpu=A100-SXM4-80G; interconnect=8x HDR 200
        Gb/s; tp=8; pp=35; sequence_parallel=n; interleave_v=1; schedule=1f1b;
        zero_stage=0; micro_batch=1; global_batch=1920; recompute=full;
        measured_quantity=step_time_s; framework=Megatron-DeepSpeed;
        source=arXiv 2201.11990
        """,
        """
        gpus dp value
        2240  8  60.1
        2800 10  50.2
        3360 12  44.4
        """,
    ),
    RunTable(
        "zb-t4",
        "Qi et al. 2023 (arXiv:2401.10241), table 4",
        """
        vocab=50304; seq_len=1024; precision=bf16; gpu=A100-SXM4-80G;
        interconnect=RoCE; tp=1; dp=1; sequence_parallel=n; zero_stage=0;
        recompute=none; measured_quantity=tokens/s/GPU; framework=Megatron-LM +
        ZB; source=arXiv 2401.10241
        """,
        """
            model layers hidden heads gpus pp v    schedule b batch   value
         GPT-1.5B     22   2304    24    8  8 1       zb-2p 6   144 14848.0
         GPT-1.5B     22   2304    24    8  8 1       zb-2p 6   192 15155.2
         GPT-1.5B     22   2304    24    8  8 1       zb-2p 6   384 15257.6
         GPT-1.5B     22   2304    24    8  8 1       zb-1p 6   144 13209.6
         GPT-1.5B     22   2304    24    8  8 1       zb-1p 6   192 13721.6
         GPT-1.5B     22   2304    24    8  8 1       zb-1p 6   384 14540.8
         GPT-1.5B     22   2304    24    8  8 1        1f1b 6   144 12083.2
         GPT-1.5B     22   2304    24    8  8 1        1f1b 6   192 12800.0
         GPT-1.5B     22   2304    24    8  8 1        1f1b 6   384 13926.4
         GPT-1.5B     22   2304    24    8  8 - interleaved 6   144 13414.4
         GPT-1.5B     22   2304    24    8  8 - interleaved 6   192 13721.6
         GPT-1.5B     22   2304    24    8  8 - interleaved 6   384 14233.6
         GPT-6.2B     30   4096    32    8  8 1       zb-2p 3    72  4423.7
         GPT-6.2B     30   4096    32    8  8 1       zb-2p 3    96  4454.4
         GPT-6.2B     30   4096    32    8  8 1       zb-2p 3   192  4495.4
         GPT-6.2B     30   4096    32    8  8 1       zb-1p 3    72  3973.1
         GPT-6.2B     30   4096    32    8  8 1       zb-1p 3    96  4096.0
         GPT-6.2B     30   4096    32    8  8 1       zb-1p 3   192  4300.8
         GPT-6.2B     30   4096    32    8  8 1        1f1b 3    72  3584.0
         GPT-6.2B     30   4096    32    8  8 1        1f1b 3    96  3788.8
         GPT-6.2B     30   4096    32    8  8 1        1f1b 3   192  4126.7
         GPT-6.2B     30   4096    32    8  8 - interleaved 3    72  4106.2
         GPT-6.2B     30   4096    32    8  8 - interleaved 3    96  4177.9
         GPT-6.2B     30   4096    32    8  8 - interleaved 3   192  4290.6
        GPT-14.6B     46   5120    40   16 16 1       zb-2p 1    48  1853.4
        GPT-14.6B     46   5120    40   16 16 1       zb-2p 1    64  1873.9
        GPT-14.6B     46   5120    40   16 16 1       zb-2p 1   128  1894.4
        GPT-14.6B     46   5120    40   16 16 1       zb-1p 1    48  1648.6
        GPT-14.6B     46   5120    40   16 16 1       zb-1p 1    64  1710.1
        GPT-14.6B     46   5120    40   16 16 1       zb-1p 1   128  1802.2
        GPT-14.6B     46   5120    40   16 16 1        1f1b 1    48  1433.6
        GPT-14.6B     46   5120    40   16 16 1        1f1b 1    64  1525.8
        GPT-14.6B     46   5120    40   16 16 1        1f1b 1   128  1679.4
        GPT-14.6B     46   5120    40   16 16 - interleaved 1    48  1577.0
        GPT-14.6B     46   5120    40   16 16 - interleaved 1    64  1628.2
        GPT-14.6B     46   5120    40   16 16 - interleaved 1   128  1699.8
        GPT-28.3B     62   6144    48   32 32 1       zb-2p 1    96  1013.8
        GPT-28.3B     62   6144    48   32 32 1       zb-2p 1   128  1024.0
        GPT-28.3B     62   6144    48   32 32 1       zb-2p 1   256  1024.0
        GPT-28.3B     62   6144    48   32 32 1       zb-1p 1    96   890.9
        GPT-28.3B     62   6144    48   32 32 1       zb-1p 1   128   921.6
        GPT-28.3B     62   6144    48   32 32 1       zb-1p 1   256   983.0
        GPT-28.3B     62   6144    48   32 32 1        1f1b 1    96   778.2
        GPT-28.3B     62   6144    48   32 32 1        1f1b 1   128   819.2
        GPT-28.3B     62   6144    48   32 32 1        1f1b 1   256   901.1
        GPT-28.3B     62   6144    48   32 32 - interleaved 1    96   839.7
        GPT-28.3B     62   6144    48   32 32 - interleaved 1   128   870.4
        GPT-28.3B     62   6144    48   32 32 - interleaved 1   256   921.6
        """,
    ),
    RunTable(
        "vocabpp",
        "Yeung et al. 2024 (arXiv:2411.05288), artifact full-exp.txt, less one of its 40 "
        "rows: 17.29 for 1f1b at 256,000 and 2,048, where table 5 prints 25.23",
        """
        model=GPT h3072 L32; layers=32; hidden=3072; heads=24; precision=bf16;
        gpu=A100-SXM4-80G; n_gpus=8; interconnect=NVLink3; tp=1; pp=8; dp=1;
        sequence_parallel=n; interleave_v=1; zero_stage=0; micro_batch=1;
        global_batch=128; recompute=none; measured_quantity=MFU %;
        framework=Megatron-LM fork; source=arXiv 2411.05288
        """,
        """
         vocab  seq            schedule value
         32000 2048                1f1b 47.52
         32000 2048  1f1b-redistributed 47.52
         32000 2048  passes_(1_barrier) 52.56
         32000 2048 passes_(2_barriers)  53.1
         32000 2048          interlaced 54.01
         64000 2048                1f1b 40.82
         64000 2048  1f1b-redistributed 49.15
         64000 2048  passes_(1_barrier) 52.36
         64000 2048 passes_(2_barriers) 52.74
         64000 2048          interlaced 53.81
        128000 2048                1f1b  33.7
        128000 2048  1f1b-redistributed 44.12
        128000 2048  passes_(1_barrier) 51.95
        128000 2048 passes_(2_barriers) 52.22
        128000 2048          interlaced 53.55
        256000 2048  1f1b-redistributed 38.21
        256000 2048  passes_(1_barrier)  51.2
        256000 2048 passes_(2_barriers) 51.73
        256000 2048          interlaced 53.14
         32000 4096                1f1b 52.82
         32000 4096  1f1b-redistributed 52.81
         32000 4096  passes_(1_barrier) 58.23
         32000 4096 passes_(2_barriers) 58.52
         32000 4096          interlaced 59.39
         64000 4096                1f1b 45.78
         64000 4096  1f1b-redistributed 53.81
         64000 4096  passes_(1_barrier) 57.94
         64000 4096 passes_(2_barriers) 58.22
         64000 4096          interlaced 59.01
        128000 4096                1f1b 37.13
        128000 4096  1f1b-redistributed 49.56
        128000 4096  passes_(1_barrier)  57.4
        128000 4096 passes_(2_barriers) 57.87
        128000 4096          interlaced 58.61
        256000 4096                1f1b 27.63
        256000 4096  1f1b-redistributed 42.45
        256000 4096  passes_(1_barrier) 56.61
        256000 4096 passes_(2_barriers) 57.31
        256000 4096          interlaced 58.04
        """,
    ),
    RunTable(
        "llama3-t4",
        "Grattafiori et al. 2024 (arXiv:2407.21783), table 4",
        """
        model=Llama3.1-405B; layers=126; hidden=16384; heads=128; kv_heads=8;
        ffn_hidden=53248; vocab=128256; precision=bf16; gpu=H100-SXM-80G;
        interconnect=400 Gb/s per GPU; tp=8; pp=16; sequence_parallel=y;
        schedule=1f1b-interleaved; zero_stage=2; micro_batch=1; recompute=none;
        measured_quantity=TFLOP/s per GPU; framework=Meta internal; source=arXiv
        2407.21783
        """,
        """
           seq  gpus  dp cp batch value
          8192  8192  64  1  2048   430
          8192 16384 128  1  2048   400
        131072 16384   8 16   128   380
        """,
    ),
    RunTable(
        "bloom-final",
        "BigScience 2022, train/tr11-176B-ml/README.md of bigscience-workshop/bigscience",
        """
        model=BLOOM-176B; layers=70; hidden=14336; heads=112; vocab=250880;
        seq_len=2048; precision=bf16; gpu=A100-SXM4-80G; n_gpus=384;
        interconnect=4x Omni-Path 100 Gb/s; tp=4; pp=12; dp=8;
        sequence_parallel=n; interleave_v=1; schedule=1f1b; zero_stage=1;
        micro_batch=2; global_batch=2048; recompute=full;
        measured_quantity=TFLOP/s per GPU; value=149.77;
        framework=Megatron-DeepSpeed; source=arXiv 2211.05100; note=counts
        recompute
        """,
        """
        """,
    ),
    RunTable(
        "palm",
        "Chowdhery et al. 2022 (arXiv:2204.02311), table 3",
        """
        model=PaLM-540B; layers=118; hidden=18432; heads=48; kv_heads=1;
        vocab=256000; seq_len=2048; precision=bf16; gpu=TPU v4; n_gpus=6144;
        interconnect=ICI; tp=12; pp=1; dp=512; schedule=none; zero_stage=3;
        global_batch=2048; recompute=full; measured_quantity=MFU %; value=46.2;
        framework=Pathways/T5X; source=arXiv 2204.02311
        """,
        """
        """,
    ),
)
"""Every table, in the order of its publication's kind: steps, schedules, models."""
