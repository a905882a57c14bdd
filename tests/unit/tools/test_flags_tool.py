"""`convert.py flags`: a Megatron job becomes a command line here, with nothing lost in silence."""

import shlex

import pytest

from megatron5d.config.load import load_config
from megatron5d.tools import convert

JOB = r"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --time=04:00:00
#SBATCH --ntasks-per-node=1
# a comment with --num-layers 99
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=${TP:-2}
OUT="/runs/moe"  # where it goes
DATA="0.7 /d/web 0.3 /d/code"
DISTRIBUTED=(--nproc_per_node $GPUS --nnodes $SLURM_NNODES)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 16
    --hidden-size 1024  # features
    --ffn-hidden-size 4096
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 64
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --no-rope-fusion
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --init-method-std 0.01
    --hidden-dropout 0.0
    --transformer-impl transformer_engine
    --attention-softmax-in-fp32
    --attention-backend flash
    --vocab-size 32000
    --make-vocab-size-divisible-by 128
)
MOE_ARGS=(
    "--num-experts 32"
    --moe-layer-freq '([0]*1+[1]*15)'
    --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512
    --moe-router-topk 4
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 1e-4
    --moe-z-loss-coeff 1e-3
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-token-dispatcher-type alltoall
)
OPTIONS=" \
    --micro-batch-size 1 \
    --global-batch-size 256 \
    --train-samples 256000 \
    --optimizer adam \
    --lr 3.0e-4 \
    --min-lr 3.0e-5 \
    --lr-decay-style cosine \
    --lr-decay-samples 256000 \
    --lr-warmup-fraction .01 \
    --weight-decay 0.1 \
    --clip-grad 1.0 \
    --adam-beta2 0.95 \
    --seed 42 \
    --bf16 \
    --tensor-model-parallel-size $TP \
    --sequence-parallel \
    --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 4 \
    --expert-model-parallel-size 4 \
    --expert-tensor-parallel-size 1 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --recompute-granularity selective \
    --recompute-modules moe_act layernorm \
    --distributed-timeout-minutes 60"
DATA_ARGS="--data-path $DATA --split 990,8,2 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok"
[ -f pretrain_gpt.py ] || echo "Error: pretrain_gpt.py is missing"
if [ "$MOCK" = 1 ]; then
    DATA_ARGS+=" --mock-data"
else TP=4
fi
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL_ARGS[@]} "${MOE_ARGS[@]}" $OPTIONS \
    $DATA_ARGS \
    --reset-position-ids --reset-attention-mask --eod-mask-loss --no-mmap-bin-files --num-workers 2 \
    --save ${OUT}/ckpt --load ${OUT}/ckpt --save-interval 500 --ckpt-format torch_dist --async-save \
    --log-interval 10 --eval-interval 200 --eval-iters 8 --tensorboard-dir $LOGS/tb \
    --wandb-project $PROJECT \
    --exit-duration-in-mins 230 --manual-gc --my-own-flag 3 2>&1 | tee log
"""
COMMAND = """sbatch --nodes=4 --time=04:00:00 launch/slurm.sbatch
model.num_layers=16 model.hidden_size=1024 model.ffn_hidden_size=4096 model.num_heads=16
model.num_kv_heads=4 model.head_dim=64 model.vocab_size=32000 model.max_positions=4096 model.norm=rmsnorm
model.norm_eps=1e-6 model.activation=swiglu model.position=rope model.rope_theta=1000000
model.rotary_percent=1.0 model.qk_norm=true model.qkv_bias=false model.attention_out_bias=false
model.mlp_bias=false model.tie_embeddings=false model.init_std=0.01 model.num_experts=32 model.top_k=4
model.moe_ffn_hidden_size=512 model.shared_ffn_hidden_size=512
model.moe_layers=[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15] model.router_score=sigmoid
model.routed_scaling_factor=2.5 model.router_bias=true
parallel.tp=2 parallel.sp=true parallel.pp=2 parallel.vpp=2 parallel.ep=4 parallel.etp=1 parallel.zero=1
parallel.timeout_s=3600
pipeline.schedule=interleaved
train.steps=1000 train.gbs=256 train.mbs=1 train.seq_len=4096 train.seed=42 train.eval_every=200
train.eval_batches=8
optim.name=adamw optim.lr=3.0e-4 optim.min_lr=3.0e-5 optim.schedule=cosine optim.warmup_steps=10
optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip=1.0
precision.dtype=bf16
kernels.attention=auto
recompute.mode=selective recompute.parts=[activation,norm]
moe.balance=[seq_aux,bias] moe.aux_coef=1e-4 moe.z_coef=1e-3 moe.bias_rate=1e-3
data.train=["0.7 /d/web","0.3 /d/code"] data.split="990,8,2" data.order=megatron data.document_mask=true
data.eod_mask_loss=true data.tokenizer=tok
checkpoint.dir=/runs/moe/ckpt checkpoint.every=500 checkpoint.keep=0 checkpoint.async=true
checkpoint.resume=auto
log.tensorboard=$LOGS/tb log.every=10 log.wandb.mode=online log.wandb.project=$PROJECT"""


@pytest.fixture
def flags(capsys):
    """Runs `convert.py flags`; gives its comments and the words of its command."""

    def run(*words):
        assert convert.main(["flags", *map(str, words)]) == 0
        lines = capsys.readouterr().out.splitlines()
        comments = [line[2:] for line in lines if line.startswith("# ")]
        text = "\n".join(line for line in lines if not line.startswith("#"))
        command = shlex.split(text.replace("\\\n", " "))
        return "\n".join(comments), command

    return run


def keys_of(command):
    return dict(word.split("=", 1) for word in command if "=" in word and word[0] != "-")


def test_a_job_script_becomes_our_command(flags, tmp_path):
    assert len({word for word in JOB.split() if word.strip('"').startswith("--")}) >= 77
    job = tmp_path / "job.sbatch"
    job.write_text(JOB)
    comments, command = flags(job)
    expected = COMMAND.replace('"0.7 /d/web","0.3 /d/code"', "WEIGHTED").split()
    expected = [word.replace("WEIGHTED", '"0.7 /d/web","0.3 /d/code"') for word in expected]
    assert sorted(command) == sorted(expected)
    for words in (
        "--exit-duration-in-mins 230: not here; SLURM's time limit",
        "--attention-dropout 0.1 (default): not here; there is no dropout",
        "--my-own-flag 3: unknown",
        'under a condition, left out: DATA_ARGS+=" --mock-data"',
        "under a condition, left out: TP=4",
        "not in what is computed: wandb_project",
        "from defaults: ",
        "--overlap-param-gather",
    ):
        assert words in comments, comments
    assert "--hidden-dropout 0" not in comments
    # on a number of ranks, as a plan that opens no files
    overrides = [word.replace("$", "") for word in command if "." in word.split("=")[0]]
    load_config(overrides[1:], world=32, files=False)


@pytest.mark.parametrize(
    ("words", "expected", "comment"),
    [
        # the defaults of Megatron-LM that train otherwise
        (
            "--num-layers 2 --hidden-size 160 --num-attention-heads 5 --vocab-size 100",
            "model.norm=layernorm model.position=learned model.activation=gelu_tanh "
            "model.mlp_bias=true model.tie_embeddings=true model.ffn_hidden_size=640 "
            "model.num_kv_heads=5 model.head_dim=32 optim.weight_decay=0.01 optim.min_lr=0 "
            "optim.betas=[0.9,0.999] optim.schedule=linear",
            "--attention-dropout 0.1 (default) --hidden-dropout 0.1 (default): not here",
        ),
        (
            "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --swiglu",
            "model.activation=swiglu model.ffn_hidden_size=256",
            "set model.vocab_size",
        ),
        (
            "--train-iters 500 --lr-decay-iters 1000 --lr-warmup-iters 10",
            "train.steps=1000 train.stop_after=500 optim.warmup_steps=10",
            "set train.gbs",
        ),
        (
            "--train-iters 500 --lr-decay-iters 400 --lr-warmup-fraction 0.1",
            "train.steps=500 optim.warmup_steps=40",
            "there after 400",
        ),
        (
            "--fp8-format hybrid --first-last-layers-bf16",
            "precision.fp8=tensorwise precision.fp8_skip_first=1 precision.fp8_skip_last=1",
            "delayed",
        ),
        ("--fp8-recipe blockwise --fp8-format e4m3", "precision.fp8=blockwise", ""),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "recompute.mode=full recompute.group_layers=2",
            "",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "recompute.mode=full recompute.num_layers=3",
            "",
        ),
        (
            "--multi-latent-attention --q-lora-rank 1536 --qk-layernorm",
            "model.attention=mla model.q_lora_rank=1536 model.kv_lora_rank=32 "
            "model.rope_interleaved=true",
            "",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 30 --decoder-first-pipeline-num-layers 6",
            "parallel.pp=4 pipeline.layout=[6,8,8,8]",
            "",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*1|t*1,L",
            'parallel.pp=2 pipeline.layout="Et*1|t*1,L"',
            "",
        ),
        (
            "--step-batch-size-schedule 0:16 2.4B:320 12B:1536 --train-samples 15360",
            "train.gbs=1536 train.steps=10 optim.schedule_by=samples",
            "",
        ),
        (
            "--num-layers $L --hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size $P",
            "model.num_layers=$L parallel.pp=$P model.norm=layernorm",
            "not in what is computed: num_layers pipeline_model_parallel_size",
        ),
        ("--tokenizer-type NullTokenizer --vocab-size 128", "model.vocab_size=129", ""),
        ("--cp-comm-type a2a --context-parallel-size 2", "parallel.cp_method=ulysses", ""),
        (
            "--rampup-batch-size 16 8 300000 --global-batch-size 64",
            "train.gbs_ramp=[16,8,300000] optim.schedule_by=samples train.gbs=64",
            "",
        ),
        (
            "--data-path /d/a /d/b --valid-data-path /d/v",
            "data.train=[/d/a,/d/b] data.valid=[/d/v] data.order=megatron",
            "",
        ),
        (
            "--fp16 --loss-scale 1024 --num-layers 2",
            "model.num_layers=2",
            "--fp16: not here; precision.dtype=bf16 needs no loss scaling",
        ),
        ("--sequence-parallel --tensor-model-parallel-size 1", "parallel.tp=1", ""),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            "parallel.zero=2",
            "",
        ),
        ("torchrun --nproc-per-node 8 x/pretrain_gpt.py --bf16", "precision.dtype=bf16", ""),
        (
            "--training.steps 20 --parallelism.tensor_parallel_degree=4",
            "train.steps=20 parallel.tp=4 parallel.zero=3 precision.dtype=bf16 optim.lr=8e-4",
            "",
        ),
        (
            "--per_device_train_batch_size 4 --learning_rate 1e-4 --output_dir out",
            "train.mbs=4 optim.lr=1e-4 log.dir=out optim.betas=[0.9,0.999]",
            "",
        ),
    ],
)
def test_flags_become_keys(flags, words, expected, comment):
    comments, command = flags("--", *words.split())
    assert comment in comments
    ours = keys_of(command)
    assert keys_of(expected.split()).items() <= ours.items(), ours
    assert "parallel.sp" not in ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.sh"], "nowhere.sh: No such file"),
        (["--", "--foo", "3"], "no flag of another code base"),
        (["job.sh"], "job.sh: no statement starts pretrain_*.py"),
        (
            [
                "--",
                "--num-layers",
                "2",
                "--hidden-size",
                "8",
                "--num-attention-heads",
                "2",
                "--moe-layer-freq",
                "[0]x3",
            ],
            "requires a sum such as [0]*3+[1]*58 (got [0]x3)",
        ),
    ],
)
def test_bad_input_is_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("echo hello\n")
    assert convert.main(["flags", *words]) == 2
    assert message in capsys.readouterr().err
