"""The catalogue of real cards that can be simulated, and where each figure comes from.

Totals are what CUDA reports (torch's `total_memory`) on Linux, which is less than the nominal size:
the driver and, where it is on, ECC keep a share. The same card differs by some 0.1 GiB from driver
to driver and has its NVML total on Windows, so a card at hand is read and never looked up here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .device import GIB
from .errors import InputError, UnknownNameError

# Line rate in transfers (bits) per second and lane; generations 3 to 5 send 128 bits as 130.
_TRANSFERS_PER_S = {3: 8 * 10**9, 4: 16 * 10**9, 5: 32 * 10**9}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where each figure comes from. An estimated total says what it was estimated from."""

    total: str
    pcie: str
    memory_bandwidth: str
    bf16: str
    total_is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """What a card has, from its vendor's documents; none of it is measured here.

    `bf16_flops_per_s` is the dense tensor core rate with fp32 accumulation, None for cards whose
    tensor cores don't do bf16. `memory_bandwidth_bytes_per_s` is None only for a custom card.
    """

    name: str
    total_bytes: int
    pcie_generation: int
    pcie_lanes: int
    memory_bandwidth_bytes_per_s: int | None
    bf16_flops_per_s: int | None
    sources: Sources

    @property
    def pcie_bytes_per_s(self) -> int:
        """Raw rate of one direction after line encoding, before packet overhead."""
        return _TRANSFERS_PER_S[self.pcie_generation] * self.pcie_lanes * 128 // (130 * 8)


def _card(
    name: str,
    total_gib: float,
    pcie: tuple[int, int],
    bandwidth_gb_per_s: float,
    bf16_tflops: float | None,
    document: str,
    *,
    reported: str = "",
    estimate: str = "",
    bf16: str = "",
) -> Card:
    """`reported` is the GitHub thread that states the total; without one, `estimate` tells how it
    was got. `bf16` is for a rate that `document` doesn't state."""
    return Card(
        name=name,
        total_bytes=round(total_gib * GIB),
        pcie_generation=pcie[0],
        pcie_lanes=pcie[1],
        memory_bandwidth_bytes_per_s=round(bandwidth_gb_per_s * 10**9),
        bf16_flops_per_s=None if bf16_tflops is None else round(bf16_tflops * 10**12),
        sources=Sources(
            total=f"estimate: {estimate}" if estimate else f"https://github.com/{reported}",
            pcie=document,
            memory_bandwidth=document,
            bf16=bf16 or document,
            total_is_estimate=bool(estimate),
        ),
    )


_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper v2.1"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell GPU architecture whitepaper, Workstation Edition"
_PAGE = "NVIDIA product page"
_SHEET = "NVIDIA datasheet"
_HALVED = "NVIDIA datasheet, half of the rate it gives with sparsity"
_NO_BF16 = "the tensor cores of Volta and Turing take fp16 and no bf16"


def _clocked(sms: int, boost_ghz: float) -> str:
    """A GeForce SM of Ampere, Ada or Blackwell: 256 bf16 multiply-adds a clock into fp32."""
    return f"derived: {sms} SMs x {boost_ghz} GHz boost x 512 flop, as in the whitepapers' tables"


# name, total GiB, PCIe (generation, lanes), memory GB/s, dense bf16 TFLOP/s, document
_CATALOGUE = (
    _card("RTX 3060 12GB", 11.75, (4, 16), 360, 25.5, _PAGE, bf16=_clocked(28, 1.777),
          reported="PromtEngineer/localGPT-Vision/issues/14"),
    _card("RTX 3080 10GB", 9.78, (4, 16), 760.3, 59.5, _AMPERE,
          reported="zai-org/CogVideo/issues/34"),
    _card("RTX 3090", 23.6, (4, 16), 936.2, 71, _AMPERE,
          reported="vllm-project/vllm/issues/16343 (23.68 there, rounded down)"),
    _card("RTX 4060 Ti 16GB", 15.6, (4, 8), 288, 44.1, _PAGE, bf16=_clocked(34, 2.535),
          estimate="as the RTX 4070 Ti SUPER, same generation and size"),
    _card("RTX 4070", 11.7, (4, 16), 504.2, 58.3, _PAGE, bf16=_clocked(46, 2.475),
          estimate="nominal x 0.975, the share of the RTX 4070 Ti SUPER"),
    _card("RTX 4070 Ti SUPER", 15.6, (4, 16), 672.3, 88.2, _PAGE, bf16=_clocked(66, 2.61),
          reported="kinggongzilla/whatsapp-ai-clone/issues/12"),
    _card("RTX 4080", 15.6, (4, 16), 716.8, 97.5, _ADA,
          estimate="as the RTX 4070 Ti SUPER, same chip and size"),
    _card("RTX 4090", 23.52, (4, 16), 1008, 165.2, _ADA,
          reported="pytorch/torchchat/issues/1341"),
    _card("RTX 5060 Ti 16GB", 15.445, (5, 8), 448, 47.4, _PAGE, bf16=_clocked(36, 2.572),
          reported="Luce-Org/lucebox/issues/407 (15,816 MiB)"),
    _card("RTX 5070", 11.6, (5, 16), 672, 61.7, _BLACKWELL,
          estimate="nominal x 0.967, the share of the RTX 5080"),
    _card("RTX 5070 Ti", 15.48, (5, 16), 896, 87.9, _BLACKWELL,
          estimate="as the RTX 5080, same chip and size"),
    _card("RTX 5080", 15.48, (5, 16), 960, 112.6, _BLACKWELL,
          reported="vllm-project/vllm/issues/14452"),
    _card("RTX 5090", 31.4, (5, 16), 1792, 209.5, _BLACKWELL,
          reported="sgl-project/sglang/pull/40592 (ollama/ollama/issues/9415: 32,117 MiB)"),
    _card("RTX A5000", 23.68, (4, 16), 768, 111.1, _SHEET, bf16=_HALVED,
          reported="zai-org/GLM-4/issues/730"),
    _card("RTX A6000", 47.4, (4, 16), 768, 154.8, _SHEET, bf16=_HALVED,
          estimate="nominal x 0.987, the share of the RTX A5000"),
    _card("RTX 6000 Ada", 44.43, (4, 16), 960, 364.2, _SHEET, bf16=_HALVED,
          reported="DINGYANB/MTVCrafter/issues/21 (ECC on)"),
    _card("RTX PRO 6000 Blackwell", 94.97, (5, 16), 1792, 503.8, _BLACKWELL_PRO,
          reported="antirez/ds4/issues/431 (CUDA's total; NVML's is 97,887 MiB)"),
    _card("T4", 14.56, (3, 16), 320, None, _PAGE, bf16=_NO_BF16,
          reported="Zheng-Chong/CatVTON/issues/133"),
    _card("L4", 22.03, (4, 16), 300, 121, _SHEET, bf16=_HALVED,
          reported="vllm-project/vllm-omni/pull/7579"),
    _card("L20", 44.4, (4, 16), 864, 119.5, _SHEET,
          bf16="as resellers quote it; no NVIDIA document seen",
          estimate="as the L40S, same chip and size"),
    _card("L40S", 44.42, (4, 16), 864, 362, _SHEET,
          reported="stepfun-ai/Step-Video-T2V/issues/8"),
    _card("A10", 22.18, (4, 16), 600, 125, _SHEET,
          reported="OpenBMB/MiniCPM-V/issues/640"),
    _card("A100 40GB", 39.4, (4, 16), 1555, 312, _SHEET,
          reported="TianheWu/CoSeR/issues/10 (39.50 there; 39.4 is typical)"),
    _card("A100 80GB", 79.2, (4, 16), 2039, 312, _SHEET,
          reported="HiDream-ai/VAREdit/issues/6 (79.25)"),
    _card("H100 80GB", 79.2, (5, 16), 3350, 989.4, "NVIDIA H100 whitepaper and datasheet, SXM5",
          estimate="as the A100 80GB; 79.18 on a card that is only called 80 GB in "
          "https://github.com/vllm-project/compressed-tensors/pull/587"),
    _card("H200", 139.8, (5, 16), 4800, 989.4, "NVIDIA H200 datasheet, SXM", bf16=_HALVED,
          reported="vllm-project/vllm-omni/pull/1842"),
    _card("B200", 178.0, (5, 16), 8000, 2250, "NVIDIA HGX B200 datasheet, per GPU", bf16=_HALVED,
          reported="sgl-project/sglang/pull/28780 (free on an idle card; totals are near 178.35)"),
    _card("V100 32GB", 31.74, (3, 16), 900, None, _SHEET, bf16=_NO_BF16,
          reported="liucongg/ChatGLM-Finetuning/issues/73"),
)  # fmt: skip

CARDS: Mapping[str, Card] = {card.name: card for card in _CATALOGUE}

# What drivers call a card where that is more than the vendor's words around our name.
_DRIVER_NAMES = {
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100 80GB",
    "H100 80GB HBM3": "H100 80GB",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell",
    "RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell",
    "V100-PCIE-32GB": "V100 32GB",
    "V100-SXM2-32GB": "V100 32GB",
}


def _key(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    vendor = {"nvidia", "geforce", "quadro", "tesla", "gpu", "generation"}
    return "".join(word for word in words if word not in vendor).removeprefix("rtx")


_BY_KEY = {_key(name): card for name, card in CARDS.items()}
_BY_KEY |= {_key(alias): CARDS[name] for alias, name in _DRIVER_NAMES.items()}


def find_card(name: str) -> Card:
    """The card called `name`, whatever its case, spacing and vendor words.

    A card that is sold in several sizes has its size in its name, and none is assumed: "A100" and
    "RTX 4060 Ti" are refused, as are variants that aren't listed ("RTX 4090 Laptop GPU").
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    hint = "residency cards lists them; --capacity 22GiB takes any other"
    if sizes := [known for known in CARDS if re.fullmatch(key + r"\d+gb", _key(known))]:
        hint = f"say which size: {' or '.join(map(repr, sizes))}; {hint}"
    raise UnknownNameError("card", name, CARDS, hint=hint)


def custom_card(total_bytes: int) -> Card:
    """A card of which only the total is known: its bus is assumed, its rates are None."""
    if total_bytes <= 0:
        raise InputError(
            f"a card of {total_bytes} bytes can't hold anything",
            hint="--capacity takes a size such as 22GiB",
        )
    return Card(
        name=f"{total_bytes / GIB:.1f} GiB card",
        total_bytes=total_bytes,
        pcie_generation=4,
        pcie_lanes=16,
        memory_bandwidth_bytes_per_s=None,
        bf16_flops_per_s=None,
        sources=Sources(
            total="given by the user",
            pcie="assumption: PCIe 4.0 x16",
            memory_bandwidth="not known",
            bf16="not known",
        ),
    )
