"""Machines as they were reported or can be. A name that begins with an id is a public case."""

from cards_machines import CARDS
from machine import Machine
from shared_machines import SHARED
from unified_machines import UNIFIED
from windows_machines import PAGED

MACHINES: dict[str, Machine] = CARDS | SHARED | UNIFIED | PAGED
