"""Child process that judges answers with math-verify, whose own time limits need a main thread.

Run as a script: reads one JSON line `[[completion, answer], ...]` at a time and writes a JSON line of booleans.
"""

import json
import logging
import os
import sys


def main() -> None:
    """Serve until the input ends."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # an answer that cannot be parsed is wrong, no news
    forms = (LatexExtractionConfig(), ExprExtractionConfig())
    print("ready", file=channel, flush=True)
    for line in sys.stdin:
        verdicts = []
        for completion, answer in json.loads(line):
            try:
                verdicts.append(bool(verify(parse(answer, forms), parse(completion, forms))))
            except Exception:
                verdicts.append(False)
        print(json.dumps(verdicts), file=channel, flush=True)


if __name__ == "__main__":
    main()
