"""The conformance suite: what it accepts."""
from __future__ import annotations

from adapters.chatbase import ChatBase
from culet.adapters.contract import adapter_contract

TestChatBase = adapter_contract(lambda: ChatBase, examples=6)
