"""`python -m jax_flash`."""

import pathlib
import re
import resource
import subprocess
import sys

import jax
import pytest

import jax_flash
from jax_flash import _native
from jax_flash.__main__ import main


def test_info_names_versions_and_backends():
    root = pathlib.Path(jax_flash.__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "jax_flash"], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    assert f"jax_flash {jax_flash.__version__}, jax {jax.__version__}" in done.stdout
    assert "cpu   fused kernels, instruction set " in done.stdout
    assert re.search("cuda  (no NVIDIA GPU here\n|(no )?fused kernels)", done.stdout)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "no NVIDIA GPU here\n"),
        ([(7, 0, 80)], "no fused kernels: .*7.0: the kernels need 8.0"),
        ([(7, 0, 80), (8, 0, 108)], "fused kernels for sm_80, "),
    ],
)
def test_info_of_gpus(nvrtc, capsys, monkeypatch, devices, message):
    monkeypatch.setattr(_native, "cuda_devices", lambda: devices)
    assert main([]) == 0
    assert re.search(rf"cuda  {message}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("gpu", "info", "warmup"),
    [
        (False, "no NVIDIA GPU here", "no NVIDIA GPU here: name the architectures to compile for, such as --arch"),
        (True, "no fused kernels: libcuda.so.1 was not found", "libcuda.so.1 was not found"),
    ],
)
def test_missing_driver(capsys, monkeypatch, tmp_path, gpu, info, warmup):
    """A missing driver is an error only if there is a GPU."""

    def cuda_devices():
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_native, "cuda_devices", cuda_devices)
    monkeypatch.setattr("jax_flash.__main__.has_nvidia_gpu", lambda: gpu)
    assert main([]) == 0
    assert f"  cuda  {info}\n" in capsys.readouterr().out
    assert main(["warmup"]) == 1
    assert capsys.readouterr().err.startswith(warmup)


def test_info_of_unavailable_instruction_set(capsys, monkeypatch):
    def cpu_isa():
        raise ValueError("JAX_FLASH_CPU_ISA=nope is not available")

    monkeypatch.setattr(_native, "cpu_isa", cpu_isa)
    assert main([]) == 0
    assert "cpu   no fused kernels: JAX_FLASH_CPU_ISA=nope is not available" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "implementation"),
    [
        ("--platform cpu", "flash"),
        ("--platform cpu --shape 2 4096 16 128 --causal --dtype bfloat16 --dropout 0.1", "flash"),
        ("--platform cpu --kv-len 77 --kv-heads 2 --value-dim 32 --dtype float64", "flash"),
        ("--platform cpu --window 100 0 --soft-cap 30 --bias --mask --segments", "flash"),
        ("--platform cuda --window 100", "flash"),
        ("--platform cuda --window 100 100000000000000000000", "flash"),
        ("--platform cuda --shape 1 2147479551 1 64", "flash"),
        ("--platform cuda --dtype bfloat16 --causal --lengths --query-offset --deterministic", "flash"),
        ("--platform cuda --full-precision", "flash"),
        ("--platform cuda --packed --shape 4 100 8 64 --causal --dropout 0.1", "flash"),
        ("--platform cuda --page 16 --shape 8 1 8 128 --kv-len 4000 --kv-heads 2", "flash"),
        ("--platform cuda --latent --shape 2 100 16 576 --dtype bfloat16 --causal", "flash"),
        ("--platform cuda --latent --page 64 --shape 2 1 16 40 --kv-len 400 --value-dim 32", "flash"),
        ("--platform cuda --dtype float64", "xla"),
        ("--platform cuda --shape 1 64 2 20", "xla"),
        ("--platform cuda --shape 1 64 2 1024", "xla"),
        ("--platform cpu --shape 1 64 2 512", "flash"),
        ("--platform tpu", "xla"),
    ],
)
def test_choose(capsys, flags, implementation):
    assert main(["choose", *flags.split()]) == 0
    first, *plan = capsys.readouterr().out.splitlines()
    chosen, _, reason = first.partition(": ")
    assert chosen == implementation
    assert reason
    passes = ["forward", "backward"][: 1 if "--page" in flags else 2] if "cuda" in flags and chosen == "flash" else []
    assert [line.split()[0] for line in plan if not line.startswith(" ")] == passes


def test_choose_prints_the_longest_supported_length(capsys):
    assert main(["choose", *"--platform cuda --shape 1 2147479552 1 64".split()]) == 0
    assert "xla: length 2147479552: the CUDA kernels support at most 2147479551" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape 1 64 8 64 --kv-heads 3", "8 heads"),
        ("--shape 1 64 8 -1", "negative"),
        ("--latent --packed --shape 1 64 8 576", "leave out --packed and --kv-heads"),
        ("--shape 1 100000000000000000000 1 64", "less than 2^63, not 100000000000000000000"),
        ("--block-mask 100000000000000000000 16", "less than 2^63, not 100000000000000000000"),
        ("--window -1 0", "local_window_size"),
        ("--window 1 2 3", "local_window_size must be an int or a pair"),
        ("--soft-cap -2", "logits_soft_cap"),
        ("--dropout 1.5", "1.5"),
        ("--packed --bias", "unexpected keyword argument 'bias'"),
        ("--page 20", "multiple of 8 keys from 8 to 1024, not 20"),
    ],
)
def test_errors_of_choose(capsys, flags, message):
    assert main(["choose", *flags.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("--dtype bfloat16 --tangent", "tangent on sm_90a"),
        ("--dtype bfloat16 --tangent scale", "plain JAX, which is slower: a differentiated scale"),
        ("--dtype bfloat16 --tangent bias", "the problem has no bias"),
    ],
)
def test_choose_prints_the_tangent(capsys, flags, printed):
    assert main(["choose", "--platform", "cuda", *flags.split()]) == 0
    assert printed in capsys.readouterr().out


def test_warmup_compiles_the_tangent(nvrtc, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    assert main(["warmup", *"--shape 1 77 2 16 --dtype bfloat16 --tangent query value --arch sm_80".split()]) == 0
    out = capsys.readouterr().out
    assert [line.partition(": ")[0] for line in out.splitlines()[:-1]] == [
        "sm_80 forward",
        "sm_80 forward with unrounded O",
        "sm_80 tangent",
    ]
    assert len(list(tmp_path.iterdir())) == 3


def test_choose_compiles_on_request(capsys, monkeypatch):
    monkeypatch.setattr(jax_flash, "explain", lambda problem, backward, compiled: f"compiled: {compiled}")
    for flags, compiled in (((), False), (("--compiled",), True)):
        assert main(["choose", "--platform", "cuda", "--dtype", "bfloat16", *flags]) == 0
        assert capsys.readouterr().out.count(f"compiled: {compiled}") == 2


def test_warmup_compiles_into_the_cache(nvrtc, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    flags = "--shape 1 77 2 16 --dtype bfloat16 --segments --backward --arch sm_80 sm_90a"
    assert main(["warmup", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sm_80 forward: scheduler/segments\.cuh, ampere/forward\.cuh \(128 x 64\) in [0-9.]+ s", out)
    assert re.search(r"sm_90a backward: scheduler/segments\.cuh, hopper/backward\.cuh \(128 x 128\) in [0-9.]+ s", out)
    assert f"kept in {tmp_path}" in out
    assert len(list(tmp_path.iterdir())) == 6  # both passes share the kernel for segments


def test_warmup_with_invalid_cache_directory(nvrtc, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "file"))
    assert main(["warmup", "--shape", "1", "77", "2", "16", "--arch", "sm_80"]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_warmup_without_space(nvrtc, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # less than a cubin
    try:
        assert main(["warmup", "--shape", "1", "77", "2", "24", "--arch", "sm_80"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    printed = capsys.readouterr()
    assert "kept" not in printed.out
    assert f"could not write a kernel to {tmp_path}" in printed.err
    assert not list(tmp_path.iterdir())


def test_warmup_of_a_list(nvrtc, capsys, monkeypatch, tmp_path):
    """Flags cover all inputs of the choice: a block mask, a bias of another dtype, a cotangent of the logsumexp."""
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    problems = tmp_path / "problems"
    lines = (
        "# forward and backward",
        "--block-mask 128 256 --blocks 2 --backward  # of 4 and 8 blocks",
        "",
        "--bias --bias-dtype float32 --backward key scale --dlogsumexp",
        "--tangent --dlogsumexp",
    )
    problems.write_text("\n".join(lines))
    compiled, flags = [], "--dtype bfloat16 --arch sm_90a --problems"
    monkeypatch.setattr(_native, "cuda_cache", lambda *call: compiled.append(call) is None)
    plan = _native.cuda_plan
    monkeypatch.setattr(_native, "cuda_plan", lambda *call, compiled=False: plan(*call))
    assert main(["warmup", *flags.split(), str(problems)]) == 0
    out = capsys.readouterr().out
    assert [out.count(f"hopper/{name}.cuh") for name in ("forward", "backward", "tangent")] == [4, 2, 1]
    fields = [_native.cuda_plan(text, backward, arch)[-1][2] for text, backward, arch in compiled]
    assert [x["kv_block"] for x in fields] == [256, 256, 0, 0, 0, 0, 0]
    assert [x["bias_dtype"] for x in fields] == [0, 0, 3, 3, 0, 0, 0]
    assert [x["dlogsumexp"] for x in fields] == [0, 0, 0, 1, 0, 0, 0]
    assert [x["unrounded"] for x in fields] == [0, 0, 1, 1, 0, 1, 0]
    assert [x["l_tangent"] for x in fields] == [0, 0, 0, 0, 0, 0, 1]
    for line, message in (
        ("--block-mask 128 24", "24"),
        ("--shape 0 1 1 8\n--problems x", "in a list"),
        (None, "none"),
    ):
        problems.write_text(line or "")
        assert main(["warmup", *flags.split(), str(problems if line else tmp_path / "none")]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arch sm_75", "8.0"),
        ("--dtype float64 --arch sm_90a", "float64"),
        ("--backward bias --arch sm_90a", "--bias"),
        ("--backward scale sinks --arch sm_90a", "--sinks"),
        ("--bias-dtype float32 --arch sm_90a", "--bias"),
        ("--dlogsumexp --arch sm_90a", "--backward"),
        ("--blocks 2 --arch sm_90a", "--block-mask"),
        ("--block-mask 128 128 --blocks -1 --arch sm_90a", "negative"),
        ("--shape 1 64 8 64 --kv-heads 3 --arch sm_90a", "8 heads"),
    ],
)
def test_errors_of_warmup(capsys, flags, message):
    assert main(["warmup", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_unknown_flags_and_commands_are_usage_errors(capsys):
    for arguments in (["choose", "--dtype", "int8"], ["chooose"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
    assert "usage: python -m jax_flash" in capsys.readouterr().err
