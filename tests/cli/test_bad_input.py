"""Each ends with 2, says what is wrong and what to do, plans nothing and writes nothing."""

from pathlib import Path

import pytest
from canned_program import CannedService, Run

PIPELINE = ("plan", "qwen-image-2.1")
PLAN = (*PIPELINE, "--card", "RTX 4090")
BAD = {
    "an unknown card": (("plan", "qwen-image-2.1", "--card", "RTX 9999"), "no card 'RTX 9999'"),
    "a card of several sizes": ((*PIPELINE, "--card", "A100"), "'A100'"),
    "no card": (PIPELINE, "no card is named"),
    "a card named twice": ((*PLAN, "--card", "4090"), "RTX 4090 is named twice"),
    "an unknown pipeline": (("plan", "qwen-imag", "--card", "RTX 4090"), "no pipeline 'qwen-imag'"),
    "a malformed shape": ((*PLAN, "--shape", "720"), "'720' is no shape"),
    "an unknown key in a shape": ((*PLAN, "--shape", "720x720:stairs=4"), "'stairs=4'"),
    "an empty shape": ((*PLAN, "--shape", ""), "'' is no shape"),
    "a shape that is too small": ((*PLAN, "--shape", "8x8"), "8x8 is too small"),
    "frames of an image pipeline": ((*PLAN, "--shape", "720x720x81"), "81 frames"),
    "a capacity that is no size": ((*PIPELINE, "--capacity", "lots"), "--capacity is 'lots'"),
    "an ambiguous unit": ((*PIPELINE, "--capacity", "22G"), "--capacity is '22G'"),
    "no capacity at all": ((*PIPELINE, "--capacity", "0"), "0 bytes"),
    "one capacity for two cards": (
        (*PLAN, "--card", "RTX 5090", "--capacity", "22GiB"),
        "--capacity is one card's",
    ),
    "a capacity below the context": (
        (*PIPELINE, "--capacity", "300MiB", "--context", "376MiB"),
        "nothing is left",
    ),
    "others that hold the whole card": ((*PLAN, "--others", "24GiB"), "nothing is left"),
    "a negative margin": ((*PLAN, "--margin", "-1GiB"), "--margin is '-1GiB'"),
    "an unknown component": (
        (*PLAN, "--component-residency", "unet=resident"),
        "no component 'unet'",
    ),
    "a residency without a value": ((*PLAN, "--component-residency", "vae"), "'vae'"),
    "a component named twice": (
        (*PLAN, "--component-residency", "vae=resident", "--component-residency", "vae=resident"),
        "vae twice",
    ),
    "a fraction above 1": (
        (*PLAN, "--layerwise-resident-layers", "text_encoder=1.7"),
        "'1.7' layers",
    ),
    "a count that is no number": (
        (*PLAN, "--layerwise-resident-layers", "text_encoder=nan"),
        "'nan' layers",
    ),
    "a way to size that isn't one": ((*PLAN, "--size", "big"), "--size is 'big'"),
    "an exposure without a value": ((*PLAN, "--exposure", "denoise"), "'denoise'"),
    "an exposure above 1": ((*PLAN, "--exposure", "denoise=1.1"), "denoise '1.1'"),
    "an exposure below 0": ((*PLAN, "--exposure", "denoise=-0.1"), "denoise '-0.1'"),
    "an exposure in percent": ((*PLAN, "--exposure", "denoise=10%"), "denoise '10%'"),
    "an exposure that is no number": ((*PLAN, "--exposure", "denoise=nan"), "denoise 'nan'"),
    "a phase exposed twice": ((*PLAN, "--exposure", "denoise=0,denoise=1"), "denoise twice"),
    "host memory that is no size": ((*PLAN, "--host-memory", "all"), "--host-memory is 'all'"),
    "a directory that isn't there": ((*PLAN, "--out", "missing/plan.json"), "missing"),
    "a directory as the file": ((*PLAN, "--out", "."), "is no file"),
    "a plan that isn't there": (("show", "plan.json"), "plan.json can't be read"),
    "a plan to explain that isn't there": (("explain", "plan.json"), "plan.json can't be read"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_ends_with_2_a_message_and_a_hint(
    run: Run,
    service: CannedService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "plan" and "--out" not in arguments:
        arguments = (*arguments, "--out", "plan.json")
    result = run(*arguments)
    error, *hints = result.err.splitlines()
    assert (result.code, result.out) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert hints
    assert all(hint.startswith("hint: ") for hint in hints)
    assert service.asked is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plam",),
        ("plan",),
        (*PLAN, "--capcity", "22GiB"),
        (*PLAN, "--explore", "-1"),
        (*PLAN, "--explore", "many"),
        (*PLAN, "--prefetch", "-1"),
        ("show",),
        ("explain",),
        ("cards", "RTX 4090"),
        (),
    ],
    ids=" ".join,
)
def test_a_misused_command_line_ends_with_2_and_names_the_help(
    run: Run, service: CannedService, arguments: tuple[str, ...]
):
    result = run(*arguments)
    assert (result.code, service.asked) == (2, None)
    assert "residency" in result.out + result.err
    assert "Traceback" not in result.err


def test_nothing_is_written_over_a_device(run: Run, service: CannedService):
    result = run(*PLAN, "--out", "/dev/null")
    assert result.code == 2
    assert "is no file" in result.err
    assert Path("/dev/null").is_char_device()
