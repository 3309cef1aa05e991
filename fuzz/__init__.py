"""The state machines of the tests, run open-ended."""
