"""The baselines of SPIRL: Data-Efficient Rainbow, DE-Rainbow-P and MAE-All.

Jiang & Weng, "Unsupervised Salient Patch Selection for Data-Efficient Reinforcement Learning", ECML 2023.

The training loop and the evaluation are those of `spirl_rainbow.py`, so that a difference in score is a difference in
method. DE-Rainbow (van Hasselt et al. 2019) sees pixels through a small convolutional network. DE-Rainbow-P does too,
after as many random steps as SPIRL's pre-training takes. MAE-All sees the embeddings of all patches of a frame.

    python spirl_baselines.py                                                       # DE-Rainbow's 100K run on Frostbite
    python spirl_baselines.py --method de-rainbow-p                                 # after 5,000 random steps
    python spirl_baselines.py --method mae-all --mae-checkpoint runs/NAME/mae.pt    # no selection of patches

Contents, in reading order:
    1. Arguments      Args, parse_args, check_common_args, check_agent_args, check_args, resumed_args, pick_device,
                      check_memory, check_compiler
    2. Environment    make_envs, game_seeds
    3. Model          MaskedAutoencoder, collect_random_frames, pretrain_mae, encode_patches
    4. Replay         Replay
    5. Agent          NoisyLinear, DataEfficientCNN, SalientPatchTransformer, RainbowNetwork, c51_loss, learn
    6. Evaluation     evaluate, watch_game, attended_patches, draw_policy_attention, save_video
    7. Files          sync, write_whole, read_checkpoint, Curves, save_checkpoint, new_run, lock_run, load_checkpoint,
                      Signals, save_mae, load_mae
    8. Main           keep_freed_memory, look_at_all_patches, look_at_pixels

The paper is in sections 2 to 6 and 8; 1 and 7 only keep a run safe, and can be skipped at first.

Shape letters: B batch, F frames stacked, L patches of a frame, P patches a side, N = P**2, p pixels a patch's side,
D width of a layer, T tokens, H attention heads, d = D / H, A actions, Z atoms, E environments, K patches that the
encoder sees. (In code F is torch.nn.functional; in frames' shapes H and W are pixels.)
"""

import argparse
import atexit
import contextlib
import copy
import ctypes
import difflib
import fcntl
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections import defaultdict, deque
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import ale_py
import gymnasium as gym
import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

matplotlib.use("Agg")  # figures go to files: no screen is needed
import matplotlib.pyplot as plt
from matplotlib.animation import PillowWriter

gym.register_envs(ale_py)


# --------------------------------------------------------------------------------------------------------- 1. Arguments


@dataclass
class Args:
    """The command line: each field is a flag, and its docstring the flag's help."""

    method: Literal["de-rainbow", "de-rainbow-p", "mae-all"] = "de-rainbow"
    """de-rainbow: a small CNN on grey frames. de-rainbow-p: the same, but the first --mae-frames steps are random and
    the run is longer by what that exceeds --learning-starts, so that it learns as long (Table 12: 5K random steps of
    103.4K on Frostbite, 50K of 148.4K elsewhere). mae-all: the embeddings of all patches (Table 1)"""
    env_id: str = "ALE/Frostbite-v5"
    """the Atari game; the paper plays Frostbite, MsPacman, Seaquest and BattleZone"""
    seed: int = 1
    """seed of every random stream: weights, masks, collection, training, noise, evaluation"""
    device: str = "auto"
    """auto (CUDA where it is, else cpu), cpu, cuda or cuda:N; a named device that is absent is an error"""
    threads: int = 0
    """CPU threads that PyTorch uses (0: its own choice); give 1 where several runs share the machine"""
    run_name: str = ""
    """name of the run's folder in runs/ (default: {game}__{script}__{seed}__{time})"""
    checkpoint_frequency: int = 10_000
    """training steps between two checkpoints (ours); pre-training has one every epoch; 0: only where a signal stops the
    run, after pre-training and before an evaluation"""
    resume: Path | None = None
    """folder of an unfinished run to go on with; the run's own arguments hold, so no other flag may stand beside it"""
    compile: bool = False
    """torch.compile the update, with CUDA graphs on a GPU: the same results up to rounding after a minute of compiling;
    it needs a C++ compiler (on a CPU) or Triton (on a GPU)"""
    capture_video: bool = False
    """save a game of the reported policy (its first 1,000 steps), what it looks at marked, as videos/*.gif"""

    # The masked auto-encoder of mae-all and its pre-training
    mae_checkpoint: Path | None = None
    """a mae.pt of the same game and sizes, in place of pre-training one"""
    mae_frames: int | None = None
    """frames of random play (the default is Table 6's: 5,000 for Frostbite, 50,000 for any other game)"""
    mae_epochs: int = 50
    """passes over those frames (Table 5); a tenth of them warms the learning rate up (Table 5: 5 of 50)"""
    mae_batch_size: int = 64
    """frames a pre-training step (Table 5)"""
    mae_learning_rate: float = 1e-3
    """base learning rate; the one used is this * mae_batch_size / 256 (Table 5)"""
    mae_weight_decay: float = 0.05
    """AdamW's weight decay on everything but biases and LayerNorm (Table 5)"""
    mae_mask_ratio: float = 0.75
    """share of the patches hidden from the encoder in pre-training (Table 5)"""
    image_size: int = 96
    """side of the square RGB frames, in pixels (Table 4)"""
    patch_size: int = 8
    """side of a patch, in pixels (Table 4)"""
    encoder_dim: int = 64
    """width of the encoder and of a patch's embedding (Table 4)"""
    encoder_depth: int = 3
    """Transformer layers of the encoder (Table 4)"""
    encoder_heads: int = 4
    """attention heads of the encoder (Table 4)"""
    decoder_dim: int = 128
    """width of the decoder (Table 4)"""
    decoder_depth: int = 3
    """Transformer layers of the decoder (Table 4)"""
    decoder_heads: int = 8
    """attention heads of the decoder (Table 4)"""

    # The agent; the first two are of mae-all alone
    agent_dim: int = 32
    """width that a patch's embedding is projected to (Table 13)"""
    agent_heads: int = 8
    """attention heads of the agent's single Transformer layer (Table 13)"""
    frame_stack: int = 4
    """latest frames that the agent sees at once (Table 9)"""
    hidden_size: int = 256
    """hidden units of the value and of the advantage stream (Table 10)"""
    num_atoms: int = 51
    """atoms of the return distribution (Rainbow, Hessel et al. 2018, Table 1)"""
    v_min: float = -10.0
    """smallest return of the distribution (Rainbow, Table 1)"""
    v_max: float = 10.0
    """largest return of the distribution (Rainbow, Table 1)"""
    noisy_std: float = 0.5
    """sigma_0 of the noisy layers (Rainbow, Table 1)"""

    # Training
    total_timesteps: int = 100_000
    """agent steps, of four game frames each (Table 12: 100K; Table 10: 400K)"""
    learning_starts: int = 1600
    """uniformly random steps before the first update (Table 10)"""
    train_frequency: int = 1
    """steps an update, once learning has started (Table 10: 1 in the 100K setting, so 98,400 updates; 4 in the 400K
    setting)"""
    buffer_size: int = 100_000
    """frames in the replay (Table 10: 100K or 400K)"""
    batch_size: int = 32
    """transitions an update (Rainbow: 32)"""
    n_step: int = 20
    """steps of a multi-step return (Table 10)"""
    gamma: float = 0.99
    """discount a step (Rainbow: 0.99)"""
    learning_rate: float = 1e-4
    """Adam's learning rate (Table 10)"""
    adam_eps: float = 1.5e-4
    """Adam's epsilon (Rainbow, Table 1)"""
    max_grad_norm: float = 10.0
    """the gradient's norm is clipped to this (data-efficient Rainbow)"""
    target_update_frequency: int = 2000
    """updates between two copies of the online network into the target network (data-efficient Rainbow)"""
    priority_exponent: float = 0.5
    """alpha: a transition is drawn in proportion to priority**alpha (Rainbow, Table 1)"""
    priority_weight: float = 0.4
    """beta at the first update; it grows linearly to 1 at the last step (Rainbow, Table 1; Table 10)"""
    max_episode_frames: int = 108_000
    """game frames after which a game is cut off; its last state still has a value (Table 9)"""

    # Evaluation
    eval_episodes: int = 50
    """games of an evaluation, each with a seed of its own (Appendix B.3)"""
    eval_frequency: int = 0
    """steps between evaluations, the best median being reported (the 400K setting: 50,000); 0: one, at the end"""
    eval_epsilon: float = 0.001
    """share of random actions in evaluation (Rainbow)"""


def fail(message):
    """Print one line about a bad argument to stderr and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    """The command line as Args, or those of the run that --resume names. tyro's boxes of errors become one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        text = " ".join(line.strip("│|+ ") for line in box.getvalue().splitlines()[1:-1])  # within the frame
        fail("; ".join(part.strip() for part in re.split("[─-]{5,}", text) if part.strip()))  # rules part it
    return resumed_args(args)


def check_common_args(args):
    """Stop with one clear line if an argument that the scripts share cannot work."""
    counts = ("seed", "checkpoint_frequency", "mae_frames", "mae_epochs", "error_cache_size", "total_timesteps",
              "learning_starts", "train_frequency", "buffer_size", "target_update_frequency", "max_episode_frames",
              "eval_frequency")  # of steps, frames, entries; other integers are sizes
    for name, value in vars(args).items():  # what holds for a field holds for all fields of its kind
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            fail(f"{flag} is {value}; give a finite number")
        may_be_zero = name in ("seed", "threads", "checkpoint_frequency", "learning_starts", "eval_frequency",
                               "eval_epsilon", "gamma", "mae_weight_decay", "noisy_std", "priority_exponent",
                               "priority_weight")
        if name not in ("v_min", "v_max") and (value < 0 or value == 0 and not may_be_zero):
            fail(f"{flag} is {value}; give a number {'of at least' if may_be_zero else 'above'} 0")
        bits = 31 if name in counts or isinstance(value, float) else 12
        if abs(value) >= 2**bits:
            fail(f"{flag} is {value}; give a number below 2**{bits}")
        shares = ("gamma", "mae_mask_ratio", "max_ratio", "coverage", "priority_exponent", "priority_weight",
                  "eval_epsilon")  # not each script has each of them
        if name in shares and value > 1:
            fail(f"{flag} is {value}; give a share of at most 1")
        if name == "coverage" and value == 1:
            fail(f"{flag} is {value}; give a share below 1, for mr* keeps more than that share of the frames whole")
    if args.threads > os.cpu_count() and args.resume is None:
        fail(f"--threads is {args.threads}; give at most the machine's {os.cpu_count()} CPUs")
    games = {name.lower(): name for name, spec in gym.registry.items()
             if name.startswith("ALE/") and spec.entry_point == "ale_py.env:AtariEnv"}
    if args.env_id not in games.values():
        wanted = args.env_id.lower() if args.env_id.lower().startswith("ale/") else f"ale/{args.env_id.lower()}"
        close = [games[name] for name in difflib.get_close_matches(wanted, games, n=3, cutoff=0.0)]
        fail(f"--env-id {args.env_id} is not an Atari game of ale-py; the closest names are {', '.join(close)}")
    if args.image_size % args.patch_size:
        fail(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    if args.image_size < 3 * args.patch_size:
        fail(f"--image-size {args.image_size} holds fewer than 3x3 patches; give at least {3 * args.patch_size}")
    for part in ("encoder", "decoder"):
        width, heads = getattr(args, f"{part}_dim"), getattr(args, f"{part}_heads")
        if width % heads:
            fail(f"--{part}-dim {width} is not a multiple of --{part}-heads {heads}")
        if width % 4:
            fail(f"--{part}-dim {width} is not a multiple of 4 (sine and cosine of two axes)")
    num_patches = (args.image_size // args.patch_size) ** 2
    if num_patches > 64**2:
        fail(f"--image-size {args.image_size} holds {num_patches} patches; give at most {64 * args.patch_size}")
    if int(num_patches * (1 - args.mae_mask_ratio)) < 1:
        fail(f"--mae-mask-ratio {args.mae_mask_ratio} leaves no patch to see; give at most "
             f"{math.floor(1e4 - 1e4 / num_patches) / 1e4}")
    of_pretraining = ("mae_epochs", "mae_batch_size", "mae_learning_rate", "mae_weight_decay", "mae_mask_ratio")
    for field in fields(args):
        if args.mae_checkpoint and field.name in of_pretraining and getattr(args, field.name) != field.default:
            fail(f"--{field.name.replace('_', '-')} is for pre-training, which --mae-checkpoint replaces; leave one of "
                 "them out")
    if args.resume is not None:
        return  # what follows was new, and there, when the run began
    if args.mae_checkpoint is not None and not os.path.isfile(args.mae_checkpoint):
        fail(f"--mae-checkpoint {args.mae_checkpoint} is not a file; give a mae.pt, or leave the flag out to pre-train")
    usable = Path(args.run_name).name == args.run_name != ".." and len(os.fsencode(args.run_name)) < 200
    if args.run_name and (not usable or (Path("runs") / args.run_name).exists()):
        fail(f"--run-name {args.run_name} is not the name of a new folder in runs/; give another name")


def check_agent_args(args):
    """Stop with one clear line if an argument of the agent or its training cannot work."""
    if args.agent_dim % args.agent_heads:
        fail(f"--agent-dim {args.agent_dim} is not a multiple of --agent-heads {args.agent_heads}")
    if args.v_min >= args.v_max:
        fail(f"--v-min {args.v_min} is not below --v-max {args.v_max}")
    if args.num_atoms < 2:
        fail("--num-atoms 1 cannot hold a distribution; give at least 2")
    if args.mae_checkpoint is not None and args.mae_frames is not None:
        fail("--mae-frames is for pre-training, which --mae-checkpoint replaces; leave one of them out")
    if args.learning_starts <= args.n_step:
        fail(f"--learning-starts {args.learning_starts} is too early; give more than --n-step {args.n_step}")
    if args.learning_starts >= args.total_timesteps:
        fail(f"--learning-starts {args.learning_starts} is not before the end; give less than "
             f"--total-timesteps {args.total_timesteps}")
    if args.train_frequency > args.total_timesteps - args.learning_starts:
        fail(f"--train-frequency {args.train_frequency} is more than the steps from --learning-starts to "
             f"--total-timesteps, {args.total_timesteps - args.learning_starts}; give at most that")
    if args.buffer_size < args.batch_size + args.n_step + args.frame_stack:
        fail(f"--buffer-size {args.buffer_size} is too small; give at least --batch-size + --n-step + --frame-stack "
             f"= {args.batch_size + args.n_step + args.frame_stack}")


def check_args(args):
    """Stop with one clear line if an argument cannot work. Nothing has been created when this runs."""
    check_common_args(args)
    check_agent_args(args)
    if args.method != "mae-all":  # there is no auto-encoder
        for field in fields(args):
            of_mae = field.name.startswith(("mae_", "image_", "patch_", "encoder_", "decoder_", "agent_"))
            read = field.name == "mae_frames" and args.method == "de-rainbow-p"
            if of_mae and not read and getattr(args, field.name) != field.default:
                fail(f"--{field.name.replace('_', '-')} is not for --method {args.method}; leave it out")
        if args.mae_frames is not None and args.mae_frames <= args.n_step:
            fail(f"--mae-frames {args.mae_frames} is too few random steps; give more than --n-step {args.n_step}")
    elif args.mae_frames is not None and args.mae_frames < args.mae_batch_size and args.mae_checkpoint is None:
        fail(f"--mae-frames {args.mae_frames} is not one batch; give at least --mae-batch-size {args.mae_batch_size}")


def resumed_args(args):
    """The arguments of the run that --resume names, or, without that flag, `args` themselves."""
    if args.resume is None:
        if any(word.split("=")[0] == "--resume" for word in sys.argv[1:]):
            fail("--resume None is not the folder of a run; give one, runs/NAME")
        return args
    words = [word.removeprefix("--resume=") for word in sys.argv[1:] if word != "--resume"]
    others = [word for word in words if Path(word) != args.resume]
    if others:
        fail(f"--resume stands alone, for the run's own arguments hold; leave {' '.join(others)} out")
    if not os.path.isfile(args.resume / "args.json"):
        fail(f"--resume {args.resume} is not the folder of a run; give one, runs/NAME")
    try:
        stored = json.loads((args.resume / "args.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"--resume {args.resume}: its args.json is damaged ({error}); start a new run")
    if not isinstance(stored, dict) or stored.keys() != plain_args(args).keys():
        fail(f"--resume {args.resume} is a run of another script or version; use what started it")
    for field in fields(args):
        kinds = [str if kind is Path else kind for kind in get_args(field.type) or [field.type]]  # or choices
        value = stored.get(field.name)
        if field.name != "resume" and value not in kinds and type(value) not in kinds:
            fail(f"--resume {args.resume}: its args.json is damaged ({field.name} is {value!r}); start a new run")
    paths = {name: Path(stored[name]) for name in ("mae_checkpoint",) if stored[name]}
    return type(args)(**{**stored, **paths, "resume": args.resume})


def pick_device(name):
    """The torch.device that `--device` asks for: "auto", "cpu", "cuda" or "cuda:N". Exits with status 2 if absent."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        fail(f"--device {name} is not a device; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        fail(f"--device {name} is absent: PyTorch sees {torch.cuda.device_count()} CUDA devices; give auto or cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(index or 0))


def check_memory(needs, device):
    """Stop with one clear line if what a run will hold, {the flag that sets its size: bytes}, is more than is free.

    Free is the GPU's, or the machine's: a container may have less.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif Path("/proc/meminfo").exists():  # Linux: free, and what the system would give back
        free = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(needs.values()) > free:
        parts = ", ".join(f"{flag} takes {size / 1e9:.1f} GB" for flag, size in needs.items())
        largest = max(needs, key=needs.get)
        fail(f"{largest} is too large: {parts}, and {device} has {free / 1e9:.1f} GB free; give a smaller {largest}")


def check_compiler(device):
    """Stop with one clear line if `--compile` cannot work here: now, and not after hours of pre-training."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:  # no compiler, no Python headers, no Triton: each fails in its own way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        compiler = "Triton" if device.type == "cuda" else "a C++ compiler"
        fail(f"--compile: PyTorch cannot compile here ({reason}); install {compiler}, or leave the flag out")


# ------------------------------------------------------------------------------------------------------- 2. Environment

# Each purpose has random streams of its own, so that evaluating more, say, never changes what training sees.
COLLECT, PRETRAIN, PLAY, ACT, LEARN, EVALUATE = range(6)


def make_envs(args, num_envs):
    """`num_envs` Atari games as one vector environment, with raw rewards. uint8 observations: for mae-all RGB,
    (num_envs, 1, H, W, 3), as in spirl_rainbow.py; for DE-Rainbow grey, (num_envs, 1, 84, 84).

    Table 9. Seeds go to `reset`. `terminations` is set at every life loss and at the game's end; the game's end is the
    one with `info["lives"] == 0`. After it comes ale-py's autoreset step, which we pre-empt with a seeded reset.
    """
    grey = args.method != "mae-all"
    size = 84 if grey else args.image_size
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",  # ale-py's AtariVectorEnv; its defaults are not the paper's
        img_height=size,
        img_width=size,
        grayscale=grey,
        stack_num=1,  # the replay stacks: each frame is then embedded and stored once
        frameskip=4,
        maxpool=True,
        noop_max=30,
        repeat_action_probability=0.0,  # the registered v5 default is 0.25, "sticky actions"
        reward_clipping=False,  # the learner clips; the score stays raw
        max_num_frames_per_episode=args.max_episode_frames,
        full_action_space=False,
        use_fire_reset=True,
        episodic_life=False,  # it would restart the game at each life loss: no second life would ever be seen
        life_loss_info=True,
    )


def game_seeds(seed, *purpose, num=1):
    """`num` independent int64 seeds below 2**31 for a purpose: an array (num,) as `AtariVectorEnv.reset` takes it.

    Consecutive integers would make runs with adjacent seeds share all but one of their evaluation games.
    """
    return np.random.SeedSequence([seed, *purpose]).generate_state(num, np.uint32).astype(np.int64) >> 1


# ------------------------------------------------------------------------------------------------------------- 3. Model


def sincos_positions(dim, side):
    """Fixed 2-D sine-cosine positions (1 + side**2, dim), a row of zeros for [cls] first, then patches row by row.

    The first half of the width encodes the column, the second half the row, each as [sin | cos].
    """
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (dim/4,)
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequency  # (side, dim/4)
    axis = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim/2)
    column, row = axis.repeat(side, 1), axis.repeat_interleave(side, 0)  # (N, dim/2) each
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64), torch.cat([column, row], 1)]).float()


class PatchEmbed(nn.Module):
    """One linear map a patch, kept as the convolution that it is in ViT so that ViT checkpoints load.

    Its stride is its size, so it is applied here to flat patches: only those that are kept are ever embedded.
    """

    def __init__(self, patch_size, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches):  # (B, T, p*p*3) -> (B, T, D)
        return F.linear(patches, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention (B, T, D) -> (B, T, D); `mask` (B, T) is False at tokens that nobody may look at."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, x):
        """Queries, keys and values of x (B, T, D), each (B, H, T, D/H)."""
        return self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        mask = mask[:, None, None, :] if mask is not None else None
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, H, T, D/H)
        return self.proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The two-layer perceptron of a Transformer layer."""

    def __init__(self, dim, ratio=4):
        super().__init__()
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.fc2 = nn.Linear(ratio * dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-LN Transformer layer: x' = x + MHSA(LN(x)), z = x' + MLP(LN(x')) (the paper's Background)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def normalize_patches(patches):
    """Eq. (2): each patch (..., p*p*3) minus its own mean, over its own (unbiased) standard deviation."""
    centred = patches - patches.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (patches.shape[-1] - 1)  # on a CPU tensor.var is far slower
    return centred / (variance + 1e-6).sqrt()


def gather_tokens(x, ids):
    """The tokens ids (B, K) of x (B, T, D): (B, K, D)."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2]))


class MaskedAutoencoder(nn.Module):
    """A small MAE (He et al. 2022; Table 4): a narrow encoder that sees some patches, a wider decoder that paints all.

    Module names are facebookresearch/mae's, so its state dicts load. 790,784 trainable parameters at the paper's sizes.
    """

    def __init__(self, image_size=96, patch_size=8, encoder_dim=64, encoder_depth=3, encoder_heads=4,
                 decoder_dim=128, decoder_depth=3, decoder_heads=8):
        super().__init__()
        self.patch_size, self.side = patch_size, image_size // patch_size
        self.num_patches = self.side**2
        self.patch_embed = PatchEmbed(patch_size, encoder_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, encoder_dim))
        self.register_buffer("pos_embed", sincos_positions(encoder_dim, self.side)[None])  # (1, 1+N, D)
        self.blocks = nn.ModuleList(Block(encoder_dim, encoder_heads) for _ in range(encoder_depth))
        self.norm = nn.LayerNorm(encoder_dim, eps=1e-6)
        self.decoder_embed = nn.Linear(encoder_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_buffer("decoder_pos_embed", sincos_positions(decoder_dim, self.side)[None])
        self.decoder_blocks = nn.ModuleList(Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, 3 * patch_size**2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)

    def patchify(self, frames):
        """Flat patches (B, N, p*p*3) of frames (B, H, W, 3), row by row, of the same type."""
        B, p, P = len(frames), self.patch_size, self.side
        return frames.reshape(B, P, p, P, p, 3).transpose(2, 3).reshape(B, P * P, p * p * 3)

    def encode(self, patches, ids, present=None):
        """Encoder outputs (B, 1+K, D), [cls] first, for flat patches (B, K, p*p*3) in [0, 1] at the places ids (B, K).

        Patches where `present` (B, K) is False are looked at by nobody, but look at the others: such a patch that
        repeats another gets the other's row.
        """
        x = self.patch_embed(patches) + self.pos_embed[0, 1:][ids]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        mask = F.pad(present, (1, 0), value=True) if present is not None else None  # [cls] is always there
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def decode(self, latent, ids):
        """All N patches, normalised as in Eq. (2), (B, N, p*p*3), from encode's output for the patches ids (B, K)."""
        x = self.decoder_embed(latent)  # (B, 1+K, D)
        places = ids[..., None].expand(-1, -1, x.shape[2])
        patches = self.mask_token.expand(len(x), self.num_patches, -1).scatter(1, places, x[:, 1:])
        x = torch.cat([x[:, :1], patches], 1) + self.decoder_pos_embed  # (B, 1+N, D)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x[:, 1:]))

    def forward(self, frames, mask_ratio=0.75, generator=None):
        """Eq. (1) for uint8 frames (B, H, W, 3): (loss, prediction (B, N, p*p*3), mask (B, N): 0 keep, 1 removed).

        The loss is over all patches, visible and masked. `generator` draws the masks on the frames' device.
        """
        patches = self.patchify(frames).float() / 255
        noise = torch.rand(patches.shape[:2], device=patches.device, generator=generator)
        kept = noise.argsort(1)[:, : int(self.num_patches * (1 - mask_ratio))]  # (B, K), a random subset
        prediction = self.decode(self.encode(gather_tokens(patches, kept), kept), kept)
        loss = F.mse_loss(prediction, normalize_patches(patches))  # Eq. (1), averaged over patches and frames
        return loss, prediction, torch.ones_like(noise).scatter(1, kept, 0.0)


PAPER_MAE_FRAMES = {"ALE/Frostbite-v5": 5_000}  # Table 6; 50,000 for every other game
HELD_OUT_FRAMES = 256  # further frames, never trained on, that watch the loss: those that follow in the same games


def collect_random_frames(args, num_frames, num_envs=8):
    """Frames (num_frames, H, W, 3), a uint8 array, of `num_envs` environments in which random play goes on, game after
    game, each with all its lives. Prints the mean score of the games that ended."""
    envs = make_envs(args, num_envs)
    rng = np.random.default_rng([args.seed, COLLECT])
    games = np.zeros(num_envs, np.int64)  # games finished so far in each environment

    def new_seeds(which):
        return np.concatenate([game_seeds(args.seed, COLLECT, env, games[env]) for env in which])

    observation, _ = envs.reset(seed=new_seeds(range(num_envs)))
    frames = np.empty((num_frames, args.image_size, args.image_size, 3), np.uint8)
    scores, score = [], np.zeros(num_envs)
    for start in tqdm(range(0, num_frames, num_envs), "collecting frames", unit_scale=num_envs, unit="frame"):
        frames[start : start + num_envs] = observation[: num_frames - start, 0]
        actions = rng.integers(envs.single_action_space.n, size=num_envs)
        observation, reward, terminated, truncated, info = envs.step(actions)
        score += reward
        over = (terminated & (info["lives"] == 0)) | truncated  # a mere life loss goes on
        if over.any():
            scores += score[over].tolist()
            score[over] = 0
            games[over] += 1
            observation, _ = envs.reset(seed=new_seeds(np.flatnonzero(over)), options={"reset_mask": over})
    envs.close()
    if scores:
        print(f"random play scored {np.mean(scores):.1f} on average over {len(scores)} whole games")
    return frames


def warmup_cosine(step, steps, peak):
    """Learning rate at a step of `steps`: up in a straight line for a tenth of them, then half a cosine to 0."""
    warmup = steps / 10
    if step < warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def pretrain_mae(args, mae, frames, held_out, device, log, resumed=None, pause=None):
    """Train `mae` in place on uint8 frames (n, H, W, 3) as Table 5 has it; returns the last held-out loss.

    `log(name, value, step)` gets the loss of each step and the held-out loss of each epoch. After each step
    `pause(state, due)` is called; `state()` is what another call needs as `resumed` to go on from there, and `due` asks
    for a checkpoint, at the end of an epoch. Where the loss or the gradient is not finite it asks for one from before
    that step, and exits with status 1.
    """
    frames, held_out = torch.from_numpy(frames), torch.from_numpy(held_out).to(device)
    decayed = [p for p in mae.parameters() if p.ndim > 1]
    others = [p for p in mae.parameters() if p.ndim <= 1]  # biases and LayerNorm
    groups = [{"params": decayed, "weight_decay": args.mae_weight_decay}, {"params": others, "weight_decay": 0.0}]
    peak = args.mae_learning_rate * args.mae_batch_size / 256
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    order = torch.Generator().manual_seed(int(game_seeds(args.seed, PRETRAIN, 0)[0]))
    masks = torch.Generator(device).manual_seed(int(game_seeds(args.seed, PRETRAIN, 1)[0]))
    batches = len(frames) // args.mae_batch_size  # the last, partial batch of an epoch is dropped
    steps, step, held_out_loss = args.mae_epochs * batches, 0, float("nan")
    if resumed:
        mae.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        order.set_state(resumed["order"])
        masks.set_state(resumed["masks"])
        step = resumed["step"]
        print(f"going on from step {step} of pre-training")

    def state():
        return {"model": mae.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "order": order_state,
                "masks": masks.get_state()}

    progress = tqdm(total=steps * args.mae_batch_size, desc="pre-training", unit="image", unit_scale=True,
                    initial=step * args.mae_batch_size)
    for epoch in range(step // batches, args.mae_epochs):
        order_state = order.get_state()  # from which this epoch's order is drawn
        shuffled = torch.randperm(len(frames), generator=order)[: batches * args.mae_batch_size]
        for batch in shuffled.split(args.mae_batch_size)[step - epoch * batches :]:
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, peak)
            mask_state = masks.get_state()
            loss, _, _ = mae(frames[batch].to(device), args.mae_mask_ratio, masks)
            optimizer.zero_grad()
            loss.backward()
            value, norm = loss.item(), nn.utils.get_total_norm([p.grad for p in mae.parameters()]).item()
            if not math.isfinite(value + norm):
                masks.set_state(mask_state)
                if pause:
                    with contextlib.suppress(SystemExit):  # of a signal that waits
                        pause(state, due=True)
                sys.exit(f"error: step {step + 1} is not finite (loss {value:.3g}, gradient {norm:.3g}), so "
                         "it is not taken; start anew with a smaller --mae-learning-rate")
            optimizer.step()
            step += 1
            log("mae/loss", value, step)
            progress.update(len(batch))
            if pause and step % batches:
                pause(state, due=False)
        held_out_loss = mae_loss(mae, held_out, args.mae_mask_ratio, args.mae_batch_size)
        log("mae/held_out_loss", held_out_loss, step)
        progress.set_postfix(epoch=epoch + 1, loss=f"{value:.4f}", held_out=f"{held_out_loss:.4f}")
        order_state = order.get_state()
        if pause:
            pause(state, due=args.checkpoint_frequency > 0 or step == steps)
    progress.close()
    return held_out_loss


@torch.no_grad()
def mae_loss(mae, frames, mask_ratio, batch_size):
    """Mean loss on uint8 frames (n, H, W, 3) of the MAE's device, under the same masks at every call."""
    masks = torch.Generator(frames.device).manual_seed(0)
    losses = [mae(batch, mask_ratio, masks)[0] * len(batch) for batch in frames.split(batch_size)]
    return (sum(losses) / len(frames)).item()


@torch.no_grad()
def encode_patches(mae, frames, patch_ids, count):
    """Embeddings (B, L, D) of the first count (B,) of patch_ids (B, L) in uint8 frames (B, H, W, 3); zeros elsewhere.

    The frozen encoder sees [cls] and the selected patches only. Its outputs lose [cls] and get their patch's fixed
    position added once more: this is what the agent stores and reads.
    """
    present = torch.arange(patch_ids.shape[1], device=frames.device) < count[:, None]  # (B, L)
    patches = gather_tokens(mae.patchify(frames), patch_ids).float() / 255
    embeddings = mae.encode(patches, patch_ids, present)[:, 1:] + mae.pos_embed[0, 1:][patch_ids]
    return embeddings * present[..., None]


# ------------------------------------------------------------------------------------------------------------ 4. Replay


class Replay:
    """Prioritised n-step replay (Schaul et al. 2016) of single frames in a ring; stacks are assembled by index.

    A slot holds one frame (of any shape and type), how many of its patches count, the action taken on it, the clipped
    reward, whether a life or the game ended there, and whether a stack starts there. A stack is blank (count 0) before
    its start. Everything is on `device`, and no method waits for it.

    Use, for each step: `append` the frame that is seen, act, `complete` it with what followed. After a truncation
    `append` the game's last frame and call `truncate`. A slot is sampled only once its n-step return is known and
    while its whole stack is still in the ring.
    """

    def __init__(self, capacity, frame_shape, dtype, device, frame_stack=4, n_step=20, gamma=0.99, alpha=0.5):
        self.capacity, self.frame_stack, self.n_step = capacity, frame_stack, n_step
        self.gamma, self.alpha, self.device = gamma, alpha, device
        self.frames = torch.zeros(capacity, *frame_shape, dtype=dtype, device=device)
        self.counts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.actions = torch.full((capacity,), -1, device=device)  # -1: no action has been taken on this frame
        self.rewards = torch.zeros(capacity, device=device)
        self.ended = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.starts = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.priorities = torch.zeros(capacity, dtype=torch.float64, device=device)  # p**alpha; 0: not to be sampled
        self.largest = torch.ones((), dtype=torch.float64, device=device)  # the largest p**alpha so far
        self.slot = -1  # the newest
        self.waiting = deque()  # slots, oldest first, whose n-step return is not known yet
        self.past = torch.arange(1 - frame_stack, 1, device=device)  # -3, -2, -1, 0
        self.ahead = torch.arange(n_step, device=device)  # 0, 1, ..., n-1
        self.after = torch.arange(1, frame_stack, device=device)  # 1, 2, 3

    def append(self, frame, count, starts):
        """Store a frame of which `count` patches count; `starts`: the frames before it are another life's."""
        self.slot = slot = (self.slot + 1) % self.capacity
        # The oldest stacks reached back to the frame that is overwritten here: unless they start later, they are gone.
        later = (slot + self.after) % self.capacity
        reach = (~self.starts[later]).cumprod(0).bool()
        self.priorities[later] = self.priorities[later].masked_fill(reach, 0.0)
        now = slice(slot, slot + 1)  # a GPU is waited for where t[slot] = number, and not where t[now] = number
        self.frames[now], self.counts[now], self.starts[now] = frame, count, starts
        self.actions[now], self.rewards[now], self.ended[now], self.priorities[now] = -1, 0.0, False, 0.0
        if len(self.waiting) == self.n_step:  # this frame is the one that the oldest of them bootstraps from
            self.priorities[self.waiting.popleft()] = self.largest

    def complete(self, action, reward, ended):
        """The newest frame's action, clipped reward, and whether a life or the game ended with it."""
        now = slice(self.slot, self.slot + 1)
        self.actions[now], self.rewards[now], self.ended[now] = action, reward, ended
        self.waiting.append(self.slot)
        if ended:
            self.truncate()

    def truncate(self):
        """No step will follow the newest frame: the returns of all slots are known."""
        while self.waiting:
            self.priorities[self.waiting.popleft()] = self.largest

    def state_dict(self):
        """All that the replay holds, for a checkpoint."""
        names = ("frames", "counts", "actions", "rewards", "ended", "starts", "priorities", "largest", "slot")
        return {name: getattr(self, name) for name in names} | {"waiting": list(self.waiting)}

    def load_state_dict(self, state):
        """Put back what state_dict returned, tensors in place: the device never holds two of them."""
        for name, value in state.items():
            setattr(self, name, getattr(self, name).copy_(value) if torch.is_tensor(value) else value)
        self.waiting = deque(self.waiting)

    def stacks(self, slots):
        """The observations that end in slots (B,): frames (B, F, *frame_shape), oldest first, and counts (B, F)."""
        window = (slots[:, None] + self.past) % self.capacity  # (B, F)
        same_life = (~self.starts[window[:, 1:]]).flip(1).cumprod(1).flip(1)  # 0 before the latest start
        return self.frames[window], self.counts[window] * F.pad(same_life, (0, 1), value=1)

    def sample(self, batch_size, beta, generator):
        """Slots (B,), in proportion to p**alpha, one from each of B equal shares of the mass; weights (B,) float32.

        The weights (1/P)**beta, over the batch's largest, correct for the uneven sampling: P is a slot's share.
        """
        # A cumulative sum and a binary search: at 100K to 400K slots as fast as a sum tree, and in one piece.
        mass = self.priorities.cumsum(0)  # float64, or 400K additions would lose the small ones
        share = torch.arange(batch_size, device=self.device, dtype=torch.float64)
        share = share + torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=generator)
        at = torch.minimum(share / batch_size * mass[-1], mass[-1].nextafter(mass.new_zeros(())))
        slots = torch.searchsorted(mass, at, right=True)  # the first slot with more mass than that
        # A GPU adds in another order, and might round onto an empty slot: that counts for nothing.
        powered = self.priorities[slots]
        weights = torch.where(powered > 0, powered**-beta, 0.0)
        return slots, (weights / weights.max()).float()

    def returns(self, slots):
        """For slots (B,): actions, sums of discounted rewards, discounts, and slots of the states to bootstrap from.

        With m = min(n, steps to the end or truncation): sum_{k<m} gamma**k r_{t+k}, and gamma**m for slot t + m, or
        0 where a life or the game ended on the way.
        """
        window = (slots[:, None] + self.ahead) % self.capacity  # (B, n)
        goes_on = F.pad((~self.ended[window[:, :-1]]).cumprod(1), (1, 0), value=1)  # no end before the k-th step
        taken = goes_on * (self.actions[window] >= 0).cumprod(1)  # (B, n): 1 for k < m
        steps = taken.sum(1)  # m
        returns = (self.rewards[window] * taken * self.gamma**self.ahead).sum(1)
        bootstraps = ~(self.ended[window] & taken.bool()).any(1)
        return self.actions[slots], returns, self.gamma**steps * bootstraps, (slots + steps) % self.capacity

    def set_priorities(self, slots, priorities):
        """New priorities p (B,), at least 1e-6, of slots (B,); where p is not finite, or no slot, the old one stays."""
        powered, old = priorities.double().clamp(min=1e-6) ** self.alpha, self.priorities[slots]
        powered = torch.where(powered.isfinite() & (old > 0), powered, old)
        self.priorities[slots] = powered
        self.largest = torch.maximum(self.largest, powered.max())


# ------------------------------------------------------------------------------------------------------------- 5. Agent


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise (Fortunato et al. 2018) in training mode, none in eval mode.

    w = mu + sigma * f(e_out) f(e_in)^T and b = mu + sigma * f(e_out), with f(e) = sign(e) sqrt(|e|): one draw, by
    `resample_noise`, is shared by the batch until the next.
    """

    def __init__(self, in_features, out_features, sigma0=0.5):
        super().__init__()
        bound = in_features**-0.5
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma0 * in_features**-0.5))
        self.bias_mu = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma0 * out_features**-0.5))
        self.register_buffer("noise_in", torch.zeros(in_features))
        self.register_buffer("noise_out", torch.zeros(out_features))

    def resample_noise(self, generator=None):
        """Draw f(e_in) and f(e_out) anew; the generator is of the layer's device."""
        for noise in (self.noise_in, self.noise_out):
            noise.normal_(generator=generator)
            noise.copy_(noise.sign() * noise.abs().sqrt())

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.weight_mu, self.bias_mu)
        # w x = mu x + f(e_out) * (sigma (f(e_in) * x)): the noisy weight itself is never formed.
        noise = F.linear(x * self.noise_in, self.weight_sigma, self.bias_sigma) * self.noise_out
        return F.linear(x, self.weight_mu, self.bias_mu) + noise


class DataEfficientCNN(nn.Module):
    """DE-Rainbow's trunk (van Hasselt et al. 2019): uint8 frames (B, F, 84, 84) and counts (B, F) -> (B, 576).

    A frame with count 0 is blank: it belongs to another life.
    """

    def __init__(self, frame_stack=4):
        super().__init__()
        self.conv1 = nn.Conv2d(frame_stack, 32, kernel_size=5, stride=5)  # 84x84 -> 16x16
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, stride=5)  # 16x16 -> 3x3

    def forward(self, frames, counts):
        x = frames * ((counts > 0) / 255)[..., None, None]  # (B, F, 84, 84), in [0, 1]
        x = x.to(memory_format=torch.channels_last)  # the layout in which strided convolutions are fastest
        return F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)


class SalientPatchTransformer(nn.Module):
    """Pools each frame's patches into one vector o_t and concatenates the stack's: (B, F, L, D), (B, F) -> (B, F*dim).

    Table 13: a linear projection, then one pre-LN Transformer layer without residual connections. Its input is the
    trainable [cls], shared by the frames, and the patches; o_t is the output's [cls] row (`pooling="cls"`) or the
    mean of its patch rows (`"mean"`, Table 15; zeros where `"mask"` leaves none). Rows of a frame past its count are
    padding (Table 14), whatever numbers they hold: read as zeros (`"zero"`), as a trainable [pad] (`"token"`), or
    masked out before the softmax (`"mask"`; the paper zeroes their weights after it). The order of the patches does
    not matter. A head is dim / heads wide: softmax(q K^T / sqrt(d)) V, with what is the same in all rows, or cancels,
    taken out of it.
    """

    def __init__(self, embed_dim=64, dim=32, heads=8, padding="zero", pooling="cls"):
        super().__init__()
        self.heads, self.padding, self.pooling = heads, padding, pooling
        if padding == "token":
            self.pad = nn.Parameter(torch.randn(embed_dim) * 0.02)
        self.project = nn.Linear(embed_dim, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.norm1 = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # a bias here adds the same to all scores: softmax ignores it
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def attend(self, embeddings, counts):
        """Attention weights (B*F, H, T', 1+L) over x (B*F, 1+L, dim); T' is 1, [cls], or the L patches."""
        present = torch.arange(embeddings.shape[2], device=counts.device) < counts[..., None]  # (B, F, L)
        x = embeddings.to(self.project.weight.dtype) * present[..., None]
        if self.padding == "token":
            x = x + self.pad * ~present[..., None]
        x = self.project(x).flatten(0, 1)  # (B*F, L, dim)
        x = self.norm1(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1))
        # Rows that are not read are not computed. As q.(W x) = (W^T q).x, the keys need not be formed either.
        q = self.query(self.norm1(self.cls_token) if self.pooling == "cls" else x[:, 1:]).unflatten(2, (self.heads, -1))
        q = torch.einsum("bthk,hkd->bhtd", q, self.key.weight.unflatten(0, (self.heads, -1)))  # (., H, T', dim)
        q = q.flatten(1, 2) * (self.key.out_features / self.heads) ** -0.5
        if self.pooling == "cls":  # it asks the same in every frame: one matrix product for all
            scores = (x @ q[0].T).transpose(1, 2)  # (B*F, H, 1+L)
        else:
            scores = q @ x.transpose(1, 2)
        if self.padding == "mask":
            there = F.pad(present.flatten(0, 1), (1, 0), value=True)  # (B*F, 1+L)
            scores = scores.masked_fill(~there[:, None], -math.inf)
        return scores.softmax(2).unflatten(1, (self.heads, -1)), x

    def forward(self, embeddings, counts):
        weights, x = self.attend(embeddings, counts)
        looked = (weights.flatten(1, 2) @ x).unflatten(1, weights.shape[1:3])  # (B*F, H, T', dim)
        # The weights sum to 1, so the mean of W x + b is W (mean of x) + b.
        values = torch.einsum("bhtd,hkd->bthk", looked, self.value.weight.unflatten(0, (self.heads, -1)))
        z = self.output(values.flatten(2) + self.value.bias)
        z = self.mlp(self.norm2(z)).unflatten(0, counts.shape)  # (B, F, T', dim)
        if self.pooling == "cls":
            return z.flatten(1)
        if self.padding != "mask":
            return z.mean(2).flatten(1)
        present = torch.arange(z.shape[2], device=z.device) < counts[..., None]
        return ((z * present[..., None]).sum(2) / counts.clamp(min=1)[..., None]).flatten(1)


class RainbowNetwork(nn.Module):
    """Dueling, noisy, distributional Q (Hessel et al. 2018) over a trunk: log-probabilities of returns, (B, A, Z)."""

    def __init__(self, trunk, trunk_dim, num_actions, hidden_size=256, num_atoms=51, v_min=-10.0, v_max=10.0,
                 sigma0=0.5):
        super().__init__()
        self.trunk = trunk
        self.value_hidden = NoisyLinear(trunk_dim, hidden_size, sigma0)
        self.value_out = NoisyLinear(hidden_size, num_atoms, sigma0)
        self.advantage_hidden = NoisyLinear(trunk_dim, hidden_size, sigma0)
        self.advantage_out = NoisyLinear(hidden_size, num_actions * num_atoms, sigma0)
        self.register_buffer("support", torch.linspace(v_min, v_max, num_atoms))  # z_0 ... z_{Z-1}

    def forward(self, frames, counts):
        o = self.trunk(frames, counts)
        o = o.detach() + (o - o.detach()) / 2**0.5  # both streams send gradients: scale them (Wang et al. 2016)
        value = self.value_out(F.relu(self.value_hidden(o)))[:, None]  # (B, 1, Z)
        advantage = self.advantage_out(F.relu(self.advantage_hidden(o))).unflatten(1, (-1, len(self.support)))
        return (value + advantage - advantage.mean(1, keepdim=True)).log_softmax(2)

    def q_values(self, frames, counts):
        """Expected returns (B, A)."""
        return (self(frames, counts).exp() * self.support).sum(2)

    def resample_noise(self, generator=None):
        """Draw the noise of every noisy layer anew."""
        for layer in (self.value_hidden, self.value_out, self.advantage_hidden, self.advantage_out):
            layer.resample_noise(generator)


def project_distribution(probabilities, returns, discounts, support):
    """Phi T Z (Bellemare et al. 2017, Eq. 7): returns + discounts * Z put back on the support, (B, Z).

    Z has probabilities (B, Z) on the evenly spaced support (Z,); returns and discounts are (B,). Each shifted atom
    shares its mass between its two neighbours in proportion to closeness: a triangular kernel, so no index is rounded.
    """
    spacing = support[1] - support[0]
    shifted = (returns[:, None] + discounts[:, None] * support).clamp(support[0], support[-1])  # (B, Z): T z_j
    kernel = (1 - (shifted[:, None, :] - support[:, None]).abs() / spacing).clamp(min=0)  # (B, Z, Z): i takes from j
    return (kernel @ probabilities[:, :, None]).squeeze(2)


def c51_loss(online, target, states, actions, returns, discounts, next_states, weights):
    """The weighted loss (a scalar) of B transitions, with KL(target || prediction) (B,) and the mean Q (a scalar).

    States are (frames, counts); actions, returns, discounts and weights are (B,).
    """
    batch = torch.arange(len(actions), device=actions.device)
    with torch.no_grad():
        best = online.q_values(*next_states).argmax(1)  # double Q-learning: the online network chooses,
        probabilities = target(*next_states)[batch, best].exp()  # the target network judges  (B, Z)
        goal = project_distribution(probabilities, returns, discounts, online.support)
    log_probs = online(*states)[batch, actions]  # (B, Z)
    divergence = (torch.xlogy(goal, goal) - goal * log_probs).sum(1)
    q = (log_probs.detach().exp() * online.support).sum(1).mean()
    return (weights * divergence).mean(), divergence.detach(), q


def learn(online, target, optimizer, replay, batch_size, beta, max_grad_norm, generator, loss_function=c51_loss):
    """One update of the online network; returns tensors (0-dimensional): loss, q (mean), grad_norm and skipped.

    skipped is 1 where the loss or the gradient is not finite: then neither weights nor priorities change, only the
    random streams. `optimizer` is a fused one (another would take that step).
    `loss_function` is c51_loss, or what torch.compile makes of it; in CUDA graphs the next call overwrites its results.
    """
    optimizer.zero_grad()
    slots, weights = replay.sample(batch_size, beta, generator)
    actions, returns, discounts, next_slots = replay.returns(slots)
    online.resample_noise(generator)
    target.resample_noise(generator)
    loss, divergence, q = loss_function(online, target, replay.stacks(slots), actions, returns, discounts,
                                        replay.stacks(next_slots), weights)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(online.parameters(), max_grad_norm)
    # A fused optimiser skips its step where found_inf is 1 (as for torch.amp.GradScaler): nobody waits to see it.
    optimizer.found_inf = 1 - (loss.detach() + grad_norm).isfinite().float()
    optimizer.step()
    replay.set_priorities(slots, torch.where(optimizer.found_inf == 1, math.nan, divergence))
    return {"loss": loss.detach(), "q": q, "grad_norm": grad_norm, "skipped": optimizer.found_inf}


# -------------------------------------------------------------------------------------------------------- 6. Evaluation


def evaluate(network, look, make_env, seeds, frame_stack, epsilon, rng, device):
    """Raw scores, a list, of one whole game for each of seeds (E,), all played at once by a network without noise.

    `look(frames)` turns uint8 frames (B, H, W, 3) on the device into what the network reads of one, (frames (B, *),
    counts (B,)). `make_env()` makes an environment of one game; each steps in a thread of its own, and a finished game
    costs nothing. `rng`, a NumPy generator, draws the share `epsilon` of random actions. A lost life does not blank
    the stack. The network is left in the mode that it was in.
    """
    envs = [make_env() for _ in seeds]
    observations = [env.reset(seed=seeds[i : i + 1])[0] for i, env in enumerate(envs)]
    playing, scores, stacks, counts = list(range(len(envs))), [0.0] * len(envs), None, None
    was_training = network.training
    network.eval()
    progress = tqdm(total=len(envs), desc="evaluating", unit="game")
    while playing:
        frames = torch.from_numpy(np.concatenate([observations[i][:, 0] for i in playing])).to(device)
        seen, count = look(frames)
        if stacks is None:  # before the game there is nothing to see: count 0
            stacks = seen.new_zeros(len(envs), frame_stack, *seen.shape[1:])
            counts = count.new_zeros(len(envs), frame_stack)
        now = torch.tensor(playing, device=device)
        stacks[now] = torch.cat([stacks[now, 1:], seen[:, None]], 1)
        counts[now] = torch.cat([counts[now, 1:], count[:, None]], 1)
        with torch.no_grad():
            actions = network.q_values(stacks[now], counts[now]).argmax(1).cpu().numpy()
        random = rng.integers(envs[0].single_action_space.n, size=len(playing))
        actions = np.where(rng.random(len(playing)) < epsilon, random, actions)
        for i, action in zip(playing, actions, strict=True):
            envs[i].send(action[None])
        for i in playing.copy():
            observations[i], reward, terminated, truncated, info = envs[i].recv()
            scores[i] += float(reward[0])
            if (terminated[0] and info["lives"][0] == 0) or truncated[0]:
                playing.remove(i)
                envs[i].close()
                progress.update()
    progress.close()
    network.train(was_training)
    return scores


@torch.no_grad()
def watch_game(network, look, env, seed, frame_stack, device, max_steps=1000):
    """Play a game (its first max_steps) without noise or random actions, for figures and videos, a step at a time.

    Yields (uint8 frame, state that the network read, and whatever `look(frames)` returns beside (frames, counts)).
    """
    was_training = network.training
    network.eval()
    try:
        observation, _ = env.reset(seed=seed)
        stack, over, step = None, False, 0
        while not over and step < max_steps:  # a policy may have learned to stand still
            seen, count, *more = look(torch.from_numpy(observation[:, 0]).to(device))
            if stack is None:
                stack = [(torch.zeros_like(seen), torch.zeros_like(count))] * frame_stack
            stack = stack[1:] + [(seen, count)]
            state = [torch.stack(part, 1) for part in zip(*stack, strict=True)]
            yield observation[0, 0].copy(), state, *more
            action = network.q_values(*state).argmax(1).cpu().numpy()
            observation, _, terminated, truncated, info = env.step(action)
            over, step = (terminated[0] and info["lives"][0] == 0) or truncated[0], step + 1
    finally:  # also where the game is not watched to its end
        network.train(was_training)


@torch.no_grad()
def attended_patches(trunk, state, patch_ids):
    """Of the newest frame of a state (batch 1): the ids (list) of the selected patches and those of the attended ones.

    The attended patches are the fewest that hold 60 % of the attention that [cls] (under mean pooling: the patches)
    pays to the selected patches, averaged over the heads (Fig. 6). patch_ids is (1, L).
    """
    weights = trunk.attend(*state)[0][-1]  # (H, T', 1+L) of the newest frame
    selected = patch_ids[0, : int(state[1][0, -1])]  # (K,)
    if trunk.padding == "mask":  # the rows of patches that are not there are not read
        weights = weights[:, : len(selected)]
    attention = weights.mean((0, 1))[1 : 1 + len(selected)]  # (K,)
    order = attention.argsort(descending=True)
    mass = attention[order].cumsum(0) / attention.sum()
    fewest = int((mass < 0.6).sum()) + 1
    return selected.tolist(), selected[order[:fewest]].tolist()


def mark_patches(frame, selected, attended, side, zoom=4):
    """The frame (H, W, 3) enlarged: selected patches in red squares, attended ones in orange and shaded yellow."""
    picture = frame.repeat(zoom, 0).repeat(zoom, 1)
    size = len(picture) // side
    for ids, colour in ((selected, (255, 0, 0)), (attended, (255, 150, 0))):
        for i in ids:
            row, column = i // side * size, i % side * size
            patch = picture[row : row + size, column : column + size]  # a view: what is painted here stays
            if colour != (255, 0, 0):
                patch[:] = (patch * 0.6 + np.array([255, 230, 0]) * 0.4).astype(np.uint8)
            patch[:2], patch[-2:], patch[:, :2], patch[:, -2:] = colour, colour, colour, colour
    return picture


def draw_policy_attention(moments, side, path, columns=4):
    """Fig. 6: what the policy looks at, in eight frames spread over a game's first 1,000 steps, as a PNG file."""
    figure, axes = plt.subplots(2, columns, figsize=(3 * columns, 6.6), layout="constrained")
    steps = np.linspace(0, len(moments) - 1, axes.size).astype(int)
    for axis, step in zip(axes.flat, steps, strict=True):
        frame, selected, attended = moments[step]
        axis.imshow(mark_patches(frame, selected, attended, side))
        axis.set_title(f"step {step}: {len(attended)} of {len(selected)} patches", fontsize=12)
        axis.axis("off")
    figure.suptitle("Red: the patches that the agent sees. Yellow: those with 60 % of its attention", fontsize=14)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)


def save_video(moments, side, path, frames_a_second=15):
    """The game as a GIF file: moments of (frame (H, W, 3), ids of selected patches, ids of attended ones)."""
    figure = plt.figure(figsize=(3.84, 3.84), dpi=100)
    image = figure.add_axes((0, 0, 1, 1)).imshow(mark_patches(*moments[0], side))
    image.axes.axis("off")

    def write(temporary):
        writer = PillowWriter(fps=frames_a_second)
        with writer.saving(figure, temporary, dpi=100):
            for moment in moments:
                image.set_data(mark_patches(*moment, side))
                writer.grab_frame()

    write_whole(path, write)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------- 7. Files


def sync(path):
    """Have a file, or the names in a folder, on the disk itself."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def write_whole(path, write):
    """Call `write(temporary_path)`, then rename the file to `path`: it is there whole or not at all.

    Raises OSError, with the path and the reason, where it cannot be written; what was at `path` then still is.
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # the ending stays: some writers read the format off it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)  # which has the new name
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk, or a folder that is gone, into the latter
        if "CUDA" in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(f"{path} cannot be written ({reason}); make room for it or give it back its folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Messages:
    """sys.stdout or sys.stderr for a long run: where it cannot be written (a log on a full disk), nothing is lost."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def one_line_for_files(kind, error, traceback):
    """An excepthook: what went wrong with a file, or no memory, is one line; any other error its traceback."""
    if issubclass(kind, OSError | MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        print(f"error: {(str(error) or kind.__name__).splitlines()[0]}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def write_json(path, content):
    """Write `content` to a JSON file, whole; paths become strings."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2, default=str) + "\n"))


def read_checkpoint(path, flag, kind="a checkpoint"):
    """The content of a .pt file, tensors on the CPU, no code run from it. Exits with status 2 if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch.load takes a flipped byte without a word
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        with torch.serialization.safe_globals([argparse.Namespace]):  # facebookresearch/mae saves its arguments as one
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # read when it is used
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return content
    except Exception as error:  # a damaged or foreign file can fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"{flag} {path} is not {kind} ({reason}); give another")


def package_versions():
    """Versions of what a run's numbers depend on, a dict."""
    packages = ("torch", "gymnasium", "ale-py", "numpy")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def cpu_settings():
    """What else the last bits of a run on a CPU depend on, a dict."""
    return {"CPU threads": torch.get_num_threads(), "CPU": torch.backends.cpu.get_cpu_capability()}


class Curves:
    """TensorBoard's event files in a folder. Where they cannot be written a run goes on, with a gap in its curves."""

    def __init__(self, folder):
        self.folder, self.writer = folder, None
        self.flush()

    def add_scalar(self, name, value, step):
        """A point of a curve; it is dropped while the file cannot be written."""
        self.attempt(lambda: self.writer and self.writer.add_scalar(name, value, step))

    def flush(self):
        """Everything to the file: to a new one where the last one failed or its folder is gone."""

        def write():
            if self.writer is None or not self.folder.is_dir():
                self.writer = SummaryWriter(self.folder)
            self.writer.flush()

        self.attempt(write)

    def attempt(self, write):
        """Call `write()`; where that fails there is a warning, and no file until the next flush."""
        try:
            write()
        except OSError as error:  # it comes from TensorBoard's thread, which has ended with it
            print(f"warning: TensorBoard's curves cannot be written ({error}); they get a gap", file=sys.stderr)
            self.writer = None


def save_checkpoint(run_dir, curves, files, content):
    """Write checkpoint.pt with the dict `content`, and how long the event files are at this moment.

    Of `files`, {name: a function that writes it}, what somebody removed is written again. Where any of it cannot be
    written there is a warning, the run goes on, and an earlier checkpoint stands.
    """
    try:
        curves.flush()  # to a new file where the folder is gone
        for name, write in files.items():
            if not (run_dir / name).exists():
                print(f"warning: {run_dir / name} is not there; it is written again", file=sys.stderr)
                write()
        events = {}
        for path in run_dir.glob("events.*"):
            sync(path)
            events[path.name] = path.stat().st_size
        content |= {"script": Path(__file__).stem, "versions": package_versions(), "events": events,
                    "cpu_settings": cpu_settings()}
        write_whole(run_dir / "checkpoint.pt", lambda temporary: torch.save(content, temporary))
    except OSError as error:
        print(f"warning: {error}; an earlier checkpoint, if there is one, stands", file=sys.stderr)


def try_to_write(write):
    """Call `write()`; where a file cannot be written, warn and go on: the run writes it again later."""
    try:
        write()
    except OSError as error:
        print(f"warning: {error}; the run goes on, and tries again later", file=sys.stderr)


def new_run(run_dir, args):
    """Make a run's folder with its args.json in it, both at one instant; returns `lock_run`'s file.

    Exits with status 2 if that is impossible, and then leaves nothing of it.
    """
    fresh = run_dir.with_name(f".{os.getpid()}.{run_dir.name}")
    try:
        write_json(fresh / "args.json", plain_args(args))
        lock = lock_run(fresh)
        os.rename(fresh, run_dir)  # fails where another run was faster
        sync(run_dir.parent)
    except OSError as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        fail(f"--run-name: the new folder {run_dir} cannot be made ({reason}); give another name, or make room for it")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return lock


def lock_run(run_dir):
    """Keep other processes off an unfinished run while this one lives: returns the file that holds the lock.

    Exits with status 2 if another process is at it, or it is finished.
    """
    try:
        lock = open(run_dir / "args.json", "r+")  # to be written, or NFS would not lock it
    except OSError as error:
        fail(f"--resume {run_dir} cannot be written ({error.strerror}); make that possible")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--resume {run_dir} is a run that is going on in another process; wait for its end, or stop it")
    except OSError:
        pass  # a file system without locks
    if (run_dir / "results.json").exists():
        fail(f"--resume {run_dir} is a finished run: its results.json is there; start a new one")
    return lock


def load_checkpoint(run_dir, args, device):
    """The content of an unfinished run's checkpoint.pt, {} where it had none yet.

    Exits with status 2 if it is damaged, or of another script, other arguments, versions or kind of device: the run
    would go on differently. Only the last bits differ with another CPU or number of threads: that is a warning.
    """
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        print(f"{run_dir} has no checkpoint yet: the run begins anew")
        return {}
    content = read_checkpoint(path, "--resume")
    here = {"script": Path(__file__).stem, "device_type": device.type, **plain_args(args), **package_versions()}
    there = {"script": content.get("script"), "device_type": content.get("device_type")}
    for part in ("args", "versions"):
        there |= content[part] if isinstance(content.get(part), dict) else {}
    for name, value in here.items():
        if there.get(name) != value:
            fail(f"--resume {run_dir}: its checkpoint.pt has {name} {there.get(name)}, and this is {value}; resume "
                 f"with what started it")
    then = content["cpu_settings"] if isinstance(content.get("cpu_settings"), dict) else {}
    for name, value in cpu_settings().items():
        if device.type == "cpu" and then.get(name) != value:
            print(f"warning: {name}: {then.get(name)} when the run stopped, {value} now; it goes on, but not bit for "
                  "bit as it would have", file=sys.stderr)
    return content


def cut_curves(run_dir, events):
    """Cut off what TensorBoard got after the checkpoint with these `events`, for it will come again.

    What is left of files that were being written is swept up too.
    """
    for file in run_dir.glob("events.*"):
        if file.name in events:
            os.truncate(file, min(events[file.name], file.stat().st_size))
        else:
            file.unlink()
    for file in run_dir.rglob(".[0-9]*.*"):
        file.unlink()


class Signals:
    """SIGINT and SIGTERM: `number` holds the one that waits for the step in progress, and 0 while there is none.

    While `at_once` is true, as at first, and at the second signal, they end the program where it stands.
    """

    def __init__(self):
        self.number, self.at_once, self.run_dir = 0, True, None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        waiting, self.number = self.number, number
        if self.at_once or waiting:
            self.stop(number)

    def stop_at_once(self):
        """From here on they end the program where it stands; one that waits does so now."""
        self.at_once = True
        if self.number:
            self.stop(self.number)

    def stop(self, number):
        """End the program, with the way to go on where there is a run."""
        if self.run_dir:
            with contextlib.suppress(OSError):  # no print: the signal may have come in the middle of one
                os.write(2, f"\nstopped; go on with --resume {self.run_dir}\n".encode())
        sys.exit(128 + number)


def mae_sizes(args):
    """The arguments of MaskedAutoencoder that `args` asks for, a dict."""
    return {"image_size": args.image_size, "patch_size": args.patch_size, "encoder_dim": args.encoder_dim,
            "encoder_depth": args.encoder_depth, "encoder_heads": args.encoder_heads, "decoder_dim": args.decoder_dim,
            "decoder_depth": args.decoder_depth, "decoder_heads": args.decoder_heads}


def plain_args(args):
    """`args` as a dict of plain values, which `torch.load(weights_only=True)` and JSON both take; without --resume.

    Paths are absolute, since a run may be resumed from another folder.
    """
    return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in vars(args).items()
            if name != "resume"}


def save_mae(path, mae, args, salient_counts):
    """Write mae.pt: model, sizes, env_id, args (of the run that writes it), and salient_counts.

    The last is a dict of K of the pre-training frames (`counts`; of the paper's games perhaps not of each frame) and
    the slope they were counted at (`lorenz_slope`), or None where nobody counted: without them a game that is not one
    of the paper's four needs --max-ratio.
    """
    content = {"model": mae.state_dict(), "sizes": mae_sizes(args), "env_id": args.env_id, "args": plain_args(args),
               "salient_counts": salient_counts}
    write_whole(path, lambda temporary: torch.save(content, temporary))


def load_mae(path, mae, args):
    """Load a checkpoint into `mae` in place; returns its `salient_counts`, or None. Exits with status 2 if it is wrong.

    Takes mae.pt and what facebookresearch/mae and the authors' code save: {"model": state dict, "args": Namespace}.
    """
    content = read_checkpoint(path, "--mae-checkpoint", "a MAE checkpoint")
    try:
        state = content["model"]
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        sizes = dict(content.get("sizes", {}))
        salient_counts = content.get("salient_counts")
        if salient_counts is not None:
            salient_counts = {"counts": salient_counts["counts"].clone(),  # the file may change
                              "lorenz_slope": salient_counts["lorenz_slope"]}
    except Exception as error:  # a damaged or foreign file can fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"--mae-checkpoint {path} is not a MAE checkpoint ({reason}); give a mae.pt")
    if content.get("env_id", args.env_id) != args.env_id:
        fail(f"--mae-checkpoint {path} is of {content['env_id']}; give --env-id {content['env_id']} or another file")
    for name, value in sizes.items():
        if value != mae_sizes(args).get(name):
            fail(f"--mae-checkpoint {path} has {name} {value}; give --{name.replace('_', '-')} {value}")
    wanted = {name: tuple(value.shape) for name, value in mae.state_dict().items()}
    for name in wanted | shapes:
        if shapes.get(name) != wanted.get(name):
            fail(f"--mae-checkpoint {path}: {name} is {shapes.get(name, 'missing')} there and "
                 f"{wanted.get(name, 'missing')} here; give the size flags that it was trained with")
    mae.load_state_dict(state)
    return salient_counts


# -------------------------------------------------------------------------------------------------------------- 8. Main


def keep_freed_memory():
    """Have glibc (Linux's C library) keep the memory that is freed, for the next step.

    By default it gives large pieces back to the system, and each step waits until they have come again, page by page:
    some three tenths of the time of DE-Rainbow's update, a ninth of the error map's. It keeps up to 1 GiB that is
    free. Elsewhere this does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: only larger ones are apart from the heap
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes that the heap may have free


def look_at_pixels(frames):
    """What DE-Rainbow sees of uint8 frames (B, 84, 84): the frames themselves, and counts (B,), all 1."""
    return frames, torch.ones(len(frames), dtype=torch.int64, device=frames.device)


@torch.no_grad()
def look_at_all_patches(mae, frames):
    """What MAE-All sees of uint8 frames (B, H, W, 3): embeddings (B, N, D) float16, counts (B,), patch_ids (B, N)."""
    patch_ids = torch.arange(mae.num_patches, device=frames.device).expand(len(frames), -1)
    count = torch.full((len(frames),), mae.num_patches, device=frames.device)
    return encode_patches(mae, frames, patch_ids, count).half(), count, patch_ids


if __name__ == "__main__":
    sys.stdout, sys.stderr = (Messages(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr))
    sys.excepthook = one_line_for_files
    # TensorBoard's thread: where it fails to write, Curves says so.
    threading.excepthook = lambda failed: issubclass(failed.exc_type, OSError) or threading.__excepthook__(failed)
    signals = Signals()
    args = parse_args()
    check_args(args)
    if args.method == "de-rainbow-p":  # Table 12 (where a run is resumed, this changes nothing)
        random_steps = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
        args.total_timesteps += random_steps - args.learning_starts  # as many steps of learning as without
        args.learning_starts = random_steps
    device = pick_device(args.device)
    keep_freed_memory()
    patches = (args.image_size // args.patch_size) ** 2
    frame_bytes = patches * args.encoder_dim * 2 if args.method == "mae-all" else 84 * 84
    check_memory({"--buffer-size": args.buffer_size * (frame_bytes + 30)}, device)
    num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.compile:
        check_compiler(device)
    seconds = defaultdict(float)  # wall seconds by phase

    @contextlib.contextmanager
    def clock(phase):
        start = time.perf_counter()
        yield
        seconds[phase] += time.perf_counter() - start

    game_name = args.env_id.removeprefix("ALE/").removesuffix("-v5")
    name = args.run_name or f"{game_name}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    run_dir = args.resume or Path("runs") / name
    lock = lock_run(run_dir) if args.resume else None
    checkpoint = load_checkpoint(run_dir, args, device) if args.resume else {}
    training = checkpoint.pop("training", None)  # None where training has not begun

    # The masked auto-encoder of MAE-All, loaded or still to be trained.
    if args.method == "mae-all":
        torch.manual_seed(args.seed)
        with torch.device(device):
            mae = MaskedAutoencoder(**mae_sizes(args))
        salient_counts = None
        if training:
            mae.load_state_dict(training["mae"])
            salient_counts = copy.deepcopy(training["salient_counts"])
        elif args.mae_checkpoint:
            salient_counts = load_mae(args.mae_checkpoint, mae, args)
        else:
            check_memory({"--mae-frames": (num_frames + HELD_OUT_FRAMES) * args.image_size**2 * 3}, torch.device("cpu"))

    if not args.resume:
        lock = new_run(run_dir, args)
    print(f"{args.method}, device {device}, {torch.get_num_threads()} CPU threads, run folder {run_dir}")
    files = {"args.json": lambda: write_json(run_dir / "args.json", plain_args(args))}  # what --resume needs
    signals.run_dir = run_dir
    if args.resume:
        cut_curves(run_dir, checkpoint.get("events", {}))
    curves = Curves(run_dir)
    seconds.update(checkpoint.get("seconds", {}))

    def pause(phase, state, due):
        """Save a checkpoint if one is due or a signal waits, and end the run if one does."""
        number = signals.number  # one that comes later waits for the next pause
        if due or number:
            with clock("checkpoint"):
                save_checkpoint(run_dir, curves, files, {phase: state(), "seconds": dict(seconds),
                                                         "args": plain_args(args), "device_type": device.type})
        if number:
            signals.stop(number)

    def pause_pretraining(state, due):
        seconds["pretrain"] = time.perf_counter() - pretraining_began - seconds["checkpoint"]
        pause("pretraining", state, due)

    if args.method == "mae-all":
        if not (training or args.mae_checkpoint):
            with clock("collect"):
                frames = collect_random_frames(args, num_frames + HELD_OUT_FRAMES)
            signals.at_once = False
            pretraining_began = time.perf_counter() - seconds["pretrain"] - seconds["checkpoint"]  # as if uninterrupted
            pretrain_mae(args, mae, frames[:num_frames], frames[num_frames:], device, curves.add_scalar,
                         checkpoint.get("pretraining"), pause_pretraining)
            signals.stop_at_once()
            del frames
        mae.eval().requires_grad_(False)
        files["mae.pt"] = lambda: save_mae(run_dir / "mae.pt", mae, args, salient_counts)
        if not training:
            try_to_write(files["mae.pt"])

    # The agent. It is seeded again: its weights are the same whether the MAE was trained or loaded.
    torch.manual_seed(args.seed)
    envs = make_envs(args, 1)
    atexit.register(vars(envs).clear)  # the emulator goes before Python does, or ale-py reports a leak
    num_actions = int(envs.single_action_space.n)
    if args.method == "mae-all":
        frame_shape, dtype = (mae.num_patches, args.encoder_dim), torch.float16
        trunk_dim = args.frame_stack * args.agent_dim
    else:
        frame_shape, dtype, trunk_dim = (84, 84), torch.uint8, 576

    def look(frames):
        """What the network reads of uint8 frames on the device: (frames, counts), and of MAE-All the patches' ids."""
        return look_at_all_patches(mae, frames) if args.method == "mae-all" else look_at_pixels(frames)

    def make_network():
        with torch.device(device):
            if args.method == "mae-all":
                trunk = SalientPatchTransformer(args.encoder_dim, args.agent_dim, args.agent_heads)
            else:
                trunk = DataEfficientCNN(args.frame_stack)
            return RainbowNetwork(trunk, trunk_dim, num_actions, args.hidden_size, args.num_atoms, args.v_min,
                                  args.v_max, args.noisy_std)

    online, target = make_network(), make_network().requires_grad_(False)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    replay = Replay(args.buffer_size, frame_shape, dtype, device, args.frame_stack, args.n_step, args.gamma,
                    args.priority_exponent)
    loss_function = c51_loss
    if args.compile:  # all shapes are fixed: one compilation, and on a GPU one graph to launch
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        loss_function = torch.compile(c51_loss, mode=mode, dynamic=False)
    action_rng = np.random.default_rng([args.seed, ACT])
    generator = torch.Generator(device).manual_seed(int(game_seeds(args.seed, LEARN)[0]))  # noise and sampling
    online.resample_noise(generator)  # to act with until the first update draws anew

    def remember(observation, starts):
        """Store what the agent sees of an observation (1, 1, H, W, ...)."""
        with clock("encode"):
            seen, count, *_ = look(torch.from_numpy(observation[:, 0]).to(device))
        with clock("store"):
            replay.append(seen[0], count[0], starts)

    def evaluation_scores():
        """Raw scores of --eval-episodes games: the same games each time, so evaluations differ by the weights alone."""
        seeds = game_seeds(args.seed, EVALUATE, num=args.eval_episodes)
        return evaluate(online, lambda frames: look(frames)[:2], lambda: make_envs(args, 1), seeds, args.frame_stack,
                        args.eval_epsilon, np.random.default_rng([args.seed, EVALUATE]), device)

    step, games, score, length, updates, recent, evaluations = 0, 0, 0.0, 0, 0, deque(maxlen=10), []
    best_median, best_weights, training_scores = -math.inf, None, []
    actions_played = []  # in the current game: the emulator's state is where they lead from the game's seed

    def training_state():
        """Everything that training needs to go on from here (the networks' noise included)."""
        return {
            "online": online.state_dict(), "target": target.state_dict(), "optimizer": optimizer.state_dict(),
            "replay": replay.state_dict(), "generator": generator.get_state(),
            "action_rng": action_rng.bit_generator.state,
            "counters": (step, games, score, length, updates, list(recent), evaluations, best_median, training_scores),
            "best_weights": best_weights, "actions_played": actions_played,
            "observation": torch.from_numpy(observation),
            **({"mae": mae.state_dict(), "salient_counts": salient_counts} if args.method == "mae-all" else {}),
        }

    observation, _ = envs.reset(seed=game_seeds(args.seed, PLAY, games))
    if training is None:
        remember(observation, starts=True)
    else:
        online.load_state_dict(training["online"])
        target.load_state_dict(training["target"])
        optimizer.load_state_dict(copy.deepcopy(training["optimizer"]))  # it keeps what it gets
        replay.load_state_dict(training["replay"])
        generator.set_state(training["generator"])
        action_rng.bit_generator.state = training["action_rng"]
        step, games, score, length, updates, latest, evaluations, best_median, training_scores = training["counters"]
        recent.extend(latest)
        best_weights, actions_played = copy.deepcopy(training["best_weights"]), training["actions_played"]
        observation, _ = envs.reset(seed=game_seeds(args.seed, PLAY, games))
        for action in actions_played:
            observation, *_ = envs.step(np.array([action]))
        if not np.array_equal(observation, training["observation"].numpy()):
            sys.exit(f"error: --resume {run_dir}: the game does not come back to where it was at step {step} "
                     f"(ale-py {version('ale-py')}, as then); the checkpoint is of another game or machine")
        print(f"going on from step {step}")
        training = None  # the file is free to be replaced

    def evaluation_is_due():
        return step > 0 and (step == args.total_timesteps or args.eval_frequency and step % args.eval_frequency == 0)

    def evaluate_now():
        """Evaluate, and keep the weights that the report will be about. A signal ends the program at once."""
        global best_median, best_weights
        signals.stop_at_once()
        with clock("evaluate"):
            scores = evaluation_scores()
        signals.at_once = False
        evaluations.append({"step": step, "scores": scores})
        curves.add_scalar("eval/mean", np.mean(scores), step)
        curves.add_scalar("eval/median", np.median(scores), step)
        if not args.eval_frequency or np.median(scores) > best_median:
            best_median = float(np.median(scores))
            best_weights = {name: value.cpu().clone() for name, value in online.state_dict().items()}

    if evaluation_is_due() and (not evaluations or evaluations[-1]["step"] < step):
        evaluate_now()  # the run was stopped in it: the checkpoint is written before
    signals.at_once = False  # from here on a step is finished and saved first
    pause("training", training_state, due=step == 0)
    # `skipped` is 1 where the last update was not finite, and so was not taken. A GPU is not waited for to learn that:
    # it comes with the next action, so the loop stops before that step; only where something is to be saved it asks.
    skipped = torch.zeros((), device=device)
    logged_at, logged_step = time.perf_counter(), step
    progress = tqdm(range(step + 1, args.total_timesteps + 1), "training", unit="step", smoothing=0.02, initial=step,
                    total=args.total_timesteps)
    for step in progress:
        if step <= args.learning_starts:
            action = action_rng.integers(num_actions, size=1)
        else:
            with clock("act"), torch.no_grad():
                state = replay.stacks(torch.full((1,), replay.slot, device=device))
                best = online.q_values(*state).argmax(1)
                action, stop = torch.stack([best, skipped[None].long()]).cpu().numpy()  # a GPU is waited for once
            if stop[0]:
                step -= 1  # the last whole one
                break

        with clock("environment"):
            observation, reward, terminated, truncated, info = envs.step(action)
        score, length = score + float(reward[0]), length + 1
        actions_played.append(int(action[0]))
        ended = bool(terminated[0])  # a life or the game: no reward after it counts
        over = (ended and info["lives"][0] == 0) or bool(truncated[0])
        with clock("store"):
            replay.complete(int(action[0]), float(np.clip(reward[0], -1, 1)), ended)  # Table 9: clipped to [-1, 1]
        if truncated[0] and not ended:  # cut off, not ended: the last state still has a value
            remember(observation, starts=False)
            replay.truncate()
        if over:
            games += 1
            recent.append(score)
            training_scores.append((step, score))
            curves.add_scalar("charts/episodic_return", score, step)
            curves.add_scalar("charts/episodic_length", length, step)
            score, length, actions_played = 0.0, 0, []
            with clock("environment"):  # a seeded reset in place of the automatic one
                observation, _ = envs.reset(seed=game_seeds(args.seed, PLAY, games))
        remember(observation, starts=ended or over)

        if step > args.learning_starts and step % args.train_frequency == 0:
            past = (step - args.learning_starts) / (args.total_timesteps - args.learning_starts)
            beta = args.priority_weight + (1 - args.priority_weight) * past
            with clock("update"):
                metrics = learn(online, target, optimizer, replay, args.batch_size, beta, args.max_grad_norm, generator,
                                loss_function)
            skipped = metrics.pop("skipped")
            updates += 1
            if updates % args.target_update_frequency == 0:
                target.load_state_dict(online.state_dict())
            if updates % 100 == 0:
                for name, value in metrics.items():
                    curves.add_scalar({"q": "charts/q"}.get(name, f"losses/{name}"), value.item(), step)

        if step % 100 == 0:
            now = time.perf_counter()
            curves.add_scalar("charts/steps_per_second", (step - logged_step) / (now - logged_at), step)
            logged_at, logged_step = now, step
            progress.set_postfix(score=f"{np.mean(recent):.0f}" if recent else "-", games=games)

        due = evaluation_is_due() or args.checkpoint_frequency and step % args.checkpoint_frequency == 0
        if (due or signals.number) and skipped:
            break
        pause("training", training_state, due)
        if evaluation_is_due():
            paused_at = time.perf_counter()
            evaluate_now()
            logged_at += time.perf_counter() - paused_at  # steps a second are training's
    if skipped:
        updates -= 1
        with contextlib.suppress(SystemExit):  # of a signal that waits
            pause("training", training_state, due=True)
        sys.exit(f"error: the loss or its gradient is not finite at step {step}, so that update is not taken; start "
                 "anew with a smaller --learning-rate, or --resume without it")
    envs.close()
    curves.flush()

    # The report. It can be made again.
    signals.stop_at_once()
    reported = max(evaluations, key=lambda e: np.median(e["scores"])) if args.eval_frequency else evaluations[-1]
    scores = reported["scores"]
    measure = "best median of the evaluations during training" if args.eval_frequency else "mean of the final weights"
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # bytes
    with contextlib.suppress(OSError, StopIteration):  # on Linux that includes the process that started this one
        host = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    on_device = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    online.load_state_dict(best_weights)
    agent = {"model": best_weights, "env_id": args.env_id, "args": plain_args(args), "step": reported["step"]}
    if args.method == "mae-all":
        files["mae.pt"]()  # again, if it could not be written before
    write_whole(run_dir / "agent.pt", lambda temporary: torch.save(agent, temporary))
    if args.method == "mae-all" or args.capture_video:
        env = make_envs(args, 1)
        game = watch_game(online, look, env, game_seeds(args.seed, EVALUATE), args.frame_stack, device)
        if args.method == "mae-all":
            side = mae.side
            moments = [(frame, *attended_patches(online.trunk, state, patch_ids)) for frame, state, patch_ids in game]
            draw_policy_attention(moments, side, run_dir / "figures" / "policy_attention.png")
        else:
            side = 1
            moments = [(frame[..., None].repeat(3, axis=2), [], []) for frame, _ in game]  # grey as RGB, nothing marked
        env.close()
        del env  # or ale-py reports a leak as Python ends
        if args.capture_video:
            save_video(moments, side, run_dir / "videos" / "policy.gif")
    write_json(run_dir / "results.json", {
        "env_id": args.env_id, "method": args.method, "seed": args.seed, "args": plain_args(args),
        "protocol": f"{measure}: {len(scores)} whole games, epsilon {args.eval_epsilon}, no noise, raw scores",
        "evaluations": evaluations, "scores": scores, "mean": float(np.mean(scores)),
        "median": float(np.median(scores)), "std": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "steps": args.total_timesteps, "updates": updates, "games": games, "training_scores": training_scores,
        "seconds": dict(seconds), "device": str(device), "threads": torch.get_num_threads(),
        "peak_memory_gb": {"host": host / 1e9, "device": on_device},
        "versions": package_versions(),
    })
    signals.run_dir = None  # there is nothing left to go on with
    (run_dir / "checkpoint.pt").unlink(missing_ok=True)
    print(f"{measure}: mean {np.mean(scores):.1f}, median {np.median(scores):.1f}; see {run_dir}/results.json")
