"""What must hold of accounts in `tree.db`: nothing is held for nobody, nothing beyond a limit."""

from __future__ import annotations

from typing import Final

_MEASURED: Final = tuple(
    (sentence, sql.replace("MEASURE", measure))
    for measure in ("tokens", "cost", "calls")
    for sentence, sql in (
        (
            "The account {} of agent {} has spent and holds more {} than its limit.",
            """
            SELECT account.what, account.slot, 'MEASURE' FROM account
            WHERE account.MEASURE_spent + account.MEASURE_held > account.MEASURE_limit
            """,
        ),
        (
            "The account {} of agent {} holds {} {}, those below it have reserved {}.",
            """
            SELECT account.what, account.slot, account.MEASURE_held, 'MEASURE',
              (SELECT coalesce(sum(iif(below.MEASURE_limit IS NULL, below.MEASURE_held,
                 below.MEASURE_limit - below.MEASURE_spent)), 0)
               FROM account AS below WHERE below.parent = account.id) AS reserved
            FROM account WHERE account.MEASURE_held <> reserved
            """,
        ),
        (
            "The account {} of agent {} has spent {} {}, those below it {} together.",
            """
            SELECT account.what, account.slot, account.MEASURE_spent, 'MEASURE',
              (SELECT coalesce(sum(below.MEASURE_spent), 0)
               FROM account AS below WHERE below.parent = account.id) AS used
            FROM account WHERE account.MEASURE_spent < used
            """,
        ),
    )
)
ACCOUNT_RULES: Final[tuple[tuple[str, str], ...]] = (
    (
        "The account {} of agent {} is {}, and so is not its run or turn.",
        """
        SELECT account.what, account.slot, account.state FROM account
        WHERE (account.state = 'open') <> (
          EXISTS (SELECT 1 FROM run WHERE run.child = account.slot
            AND run.id = account.what AND run.status = 'running')
          OR EXISTS (SELECT 1 FROM fiber WHERE fiber.owner = account.slot
            AND fiber.id = account.what AND fiber.status = 'running'))
        """,
    ),
    (
        "The account {} of agent {} is of no run and of no turn.",
        """
        SELECT account.what, account.slot FROM account
        WHERE NOT EXISTS (SELECT 1 FROM run
          WHERE run.child = account.slot AND run.id = account.what)
        AND NOT EXISTS (SELECT 1 FROM fiber
          WHERE fiber.owner = account.slot AND fiber.id = account.what)
        """,
    ),
    (
        "The account {} of agent {} has ended, nothing draws on it, and it is not closed.",
        """
        SELECT account.what, account.slot FROM account
        WHERE account.state = 'ended' AND NOT EXISTS (
          SELECT 1 FROM account AS below
          WHERE below.parent = account.id AND below.state <> 'closed')
        """,
    ),
    *_MEASURED,
)
