"""Bad input, to all three scripts: one line that names the flag, what is wrong and what would work; exit status 2."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from test_script import refusal, run

import spirl_baselines
import spirl_mae
import spirl_rainbow

SCRIPTS = {"spirl_rainbow.py": spirl_rainbow, "spirl_mae.py": spirl_mae, "spirl_baselines.py": spirl_baselines}

# What all scripts have in common.
COMMON = [
    (["--env-id", "ALE/Frostbit-v5"], "--env-id ALE/Frostbit-v5 is not an Atari game .* ALE/Frostbite-v5"),
    (["--env-id", "CartPole-v1"], "--env-id CartPole-v1 is not an Atari game"),
    (["--env-id", ""], "--env-id  is not an Atari game"),
    (["--device", "cuda:99"], "--device cuda:99 is absent: .* give auto or cpu"),
    (["--device", "tpu"], "--device tpu is not a device; give auto, cpu, cuda or cuda:N"),
    (["--run-name", "a/b"], "--run-name a/b is not the name of a new folder"),
    (["--run-name", ".."], "--run-name .. is not the name of a new folder"),
    (["--run-name", "x" * 300], "--run-name xxx.* is not the name of a new folder in runs/; give another"),
    (["--seed", "one"], "Error parsing --seed: invalid literal for int"),
    (["--seed", "1.5"], "Error parsing --seed"),
    (["--seed"], "Missing value for argument '--seed'"),
    (["--seeed", "1"], "Unrecognized options: --seeed, 1; Perhaps you meant: --seed INT"),
    (["frostbite"], "Unrecognized options: frostbite"),
    (["--env-id", "zzzzzz"], "--env-id zzzzzz is not an Atari game of ale-py; the closest names are ALE/"),
    (["--run-name", "\u6e38" * 150], "--run-name \u6e38+ is not the name of a new folder"),
    (["--resume", "nowhere"], "--resume nowhere is not the folder of a run"),
    (["--resume", "x" * 300], "--resume x+ is not the folder of a run"),
    (["--resume", "None"], "--resume None is not the folder of a run"),
    (["--resume", "nowhere", "--seed", "2"], "--resume stands alone"),
    (["--seed", "2", "--resume=nowhere"], "--resume stands alone"),
]
# What the scripts with an auto-encoder have in common.
OF_MAE = [
    (["--image-size", "100"], "--image-size 100 is not a multiple of --patch-size 8"),
    (["--image-size", "16"], "--image-size 16 holds fewer than 3x3 patches; give at least 24"),
    (["--image-size", "4000"], "--image-size 4000 holds 250000 patches; give at most 512"),
    (["--encoder-heads", "5"], "--encoder-dim 64 is not a multiple of --encoder-heads 5"),
    (["--decoder-heads", "5"], "--decoder-dim 128 is not a multiple of --decoder-heads 5"),
    (["--encoder-dim", "62", "--encoder-heads", "2"], "--encoder-dim 62 is not a multiple of 4"),
    (["--mae-mask-ratio", "0.999"], "--mae-mask-ratio 0.999 leaves no patch to see; give at most 0.993$"),
    (["--mae-frames", "10"], "--mae-frames 10 is not one batch; give at least --mae-batch-size 64"),
    (["--mae-frames", "2000000000"], "--mae-frames is too large: .* GB free; give a smaller --mae-frames"),
    (["--mae-checkpoint", "nowhere.pt"], "--mae-checkpoint nowhere.pt is not a file; give a mae.pt"),
    (["--mae-checkpoint", "x" * 300], "--mae-checkpoint x+ is not a file; give a mae.pt"),
    (["--mae-checkpoint", "empty.pt"], "--mae-checkpoint empty.pt is not a MAE checkpoint"),
    (["--mae-checkpoint", "empty.pt", "--mae-epochs", "10"], "--mae-epochs is for pre-train"),
]
OF_SELECTION = [
    (["--max-ratio", "0.001"], "--max-ratio 0.001 keeps no patch of 144; give at least 0.007"),
    (["--max-ratio", "0.0069"], "--max-ratio 0.0069 keeps no patch of 144; give at least 0.007"),
    (["--error-cache-size", "2000000000", "--device", "cpu"], "--error-cache-size is too large"),
]
OF_AGENT = [
    (["--learning-starts", "100000"], "--learning-starts 100000 is not before the end; give less than"),
    (["--learning-starts", "10"], "--learning-starts 10 is too early; give more than --n-step 20"),
    (["--buffer-size", "30"], "--buffer-size 30 is too small; give at least --batch-size"),
    (["--buffer-size", "2000000000"], "--buffer-size is too large: .* GB free; give a smaller --buffer-size"),
    (["--total-timesteps", "5000", "--train-frequency", "5001"],
     "--train-frequency 5001 is more than the steps from --learning-starts to --total-timesteps, 3400; give"),
    (["--v-min", "10"], "--v-min 10.0 is not below --v-max 10.0"),
    (["--num-atoms", "1"], "--num-atoms 1 cannot hold a distribution; give at least 2"),
]
ROWS = [(script, *row) for script in SCRIPTS for row in COMMON]
ROWS += [("spirl_rainbow.py", *row) for row in OF_MAE + OF_SELECTION + OF_AGENT]
ROWS += [("spirl_mae.py", *row) for row in OF_MAE + OF_SELECTION]
ROWS += [("spirl_baselines.py", ["--method", "mae-all", *flags], message) for flags, message in OF_MAE + OF_AGENT]
ROWS += [("spirl_baselines.py", flags, message) for flags, message in OF_AGENT]
ROWS += [
    ("spirl_rainbow.py", ["--mae-checkpoint", "empty.pt", "--mae-frames", "500"], "--mae-frames is for pre-train"),
    ("spirl_mae.py", ["--coverage", "1"], "--coverage is 1.0; give a share below 1"),
    ("spirl_rainbow.py", ["--agent-heads", "5"], "--agent-dim 32 is not a multiple of --agent-heads 5"),
    ("spirl_rainbow.py", ["--padding", "ones"], "invalid choice 'ones' for argument '--padding'"),
    ("spirl_baselines.py", ["--method", "ppo"], "invalid choice 'ppo' for argument '--method'"),
    ("spirl_baselines.py", ["--mae-checkpoint", "empty.pt"], "--mae-checkpoint is not for --method de-rainbow"),
    ("spirl_baselines.py", ["--mae-frames", "5000"], "--mae-frames is not for --method de-rainbow; leave it out"),
    ("spirl_baselines.py", ["--method", "de-rainbow-p", "--encoder-dim", "32"],
     "--encoder-dim is not for --method de-rainbow-p"),
    ("spirl_baselines.py", ["--method", "de-rainbow-p", "--mae-frames", "-3"], "--mae-frames is -3"),
    ("spirl_baselines.py", ["--method", "de-rainbow-p", "--mae-frames", "10"],
     "--mae-frames 10 is too few random steps; give more than"),
    ("spirl_baselines.py", ["--method", "mae-all", "--agent-heads", "5"],
     "--agent-dim 32 is not a multiple of --agent-heads 5"),
]


def test_each_row_gets_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.pt").write_bytes(b"")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for script, flags, message in ROWS:
        if "--error-cache-size" in flags and memory > 26e9:  # it may fit
            continue
        err = refusal(tmp_path, monkeypatch, capsys, *flags, script=script)
        assert re.match(f"error: {message}", err), (script, flags, err)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_process_ends_with_status_2(tmp_path, script):
    """The same from the shell, also where no folder can be made."""
    done = run(tmp_path, "--env-id", "ALE/Frostbit-v5", script=script)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: --env-id ALE/Frostbit-v5") and done.stderr.count("\n") == 1
    if Path("/sys").is_dir():  # where nobody may write, not even root
        done = run("/sys", "--run-name", "x", script=script)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert re.match("error: --run-name: the new folder runs/x cannot be made", done.stderr), done.stderr


@pytest.mark.parametrize("script", ["spirl_rainbow.py", "spirl_baselines.py"])
def test_compile_without_a_compiler(tmp_path, monkeypatch, script):
    """It is found out before the hours of pre-training."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))  # nothing was compiled before
    (tmp_path / "here").mkdir()
    done = run(tmp_path / "here", "--compile", "--device", "cpu", script=script)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list((tmp_path / "here").iterdir())
    assert done.stderr.startswith("error: --compile: PyTorch cannot compile here (InvalidCxxCompiler"), done.stderr


# A zero that means something: nothing of it, or PyTorch's choice, or only at the end.
ZERO_WORKS = {"seed", "threads", "checkpoint_frequency", "eval_frequency", "eval_epsilon", "gamma", "mae_weight_decay",
              "noisy_std", "priority_exponent", "priority_weight", "v_min", "v_max"}
SHARES = {"gamma", "mae_mask_ratio", "max_ratio", "coverage", "priority_exponent", "priority_weight", "eval_epsilon"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_is_checked(script, capsys):
    """Negative, zero, not a number, infinite, overflowing, and shares above 1, in every field that is a number."""
    module, tried = SCRIPTS[script], 0
    args = {"method": "mae-all"} if script == "spirl_baselines.py" else {}
    for field in dataclasses.fields(module.Args):
        if not (field.type in (int, float) or field.type in (int | None, float | None)):
            continue
        whole = field.type in (int, int | None)
        values = [2**31, 10**30] if whole else [float("nan"), float("inf"), -float("inf"), 1e30, 2.0**31]
        values += [-1] if field.name not in ("v_min", "v_max") else []
        values += [0] if field.name not in ZERO_WORKS | {"learning_starts"} else []
        values += [1.5] if field.name in SHARES else []
        for value in values:
            with pytest.raises(SystemExit) as stop:
                module.check_args(module.Args(**{**args, field.name: value}))
            err = capsys.readouterr().err
            assert stop.value.code == 2 and err.count("\n") == 1, err
            assert err.startswith(f"error: --{field.name.replace('_', '-')} is {value}; give a "), err
            tried += 1
        if field.name in ZERO_WORKS - {"v_max"}:
            module.check_args(module.Args(**{**args, field.name: 0}))
    assert tried > (60 if script == "spirl_mae.py" else 120)
    print(f"{tried} numbers refused")


@pytest.mark.parametrize("side", [3, 7, 10, 12, 64])
def test_the_ratios_that_are_advised_work(side, capsys):
    """What the message says would work is accepted, on any number of patches."""
    for field, wrong in (("max_ratio", 0.5 / side**2), ("mae_mask_ratio", 1 - 0.5 / side**2)):
        args = {"image_size": 8 * side, "env_id": "ALE/Pong-v5"}
        with pytest.raises(SystemExit):
            spirl_rainbow.check_args(spirl_rainbow.Args(**args, **{field: wrong}))
        advised = float(capsys.readouterr().err.split()[-1])
        spirl_rainbow.check_args(spirl_rainbow.Args(**args, **{field: advised}))


def test_a_run_folder_that_exists_is_not_touched(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs/done").mkdir(parents=True)
    (tmp_path / "runs/done/results.json").write_text("{}")
    for script in SCRIPTS:
        err = refusal(tmp_path, monkeypatch, capsys, "--run-name", "done", script=script)
        assert err.startswith("error: --run-name done is not the name of a new folder in runs/; give another name")
