"""Machines whose rules may await: the product's own, under the name used here."""

from culet.kernel.testing_guest import TICKS_MAX as TICKS_MAX
from culet.kernel.testing_guest import TrioMachine as TrioMachine
