"""The pure half: decisions without I/O, clock, chance or logging.

Everything here takes values and returns values. `now_ms`, fresh ids and chance
arrive as arguments, so each decision can be tabled, replayed and fuzzed.
"""
