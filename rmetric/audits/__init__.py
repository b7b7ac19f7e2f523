"""Silent errors: is this training doing what it should? Checks that need no reference run.

`Monitor(..., audits=True)` runs them; each audit is one file with one class (`Audit`), listed in
`AUDITS`. docs/audits.md has an example of each finding.
"""

from rmetric.audits.auditor import AUDITS, Auditor, make_audits
from rmetric.audits.contract import Audit
from rmetric.audits.finding import KINDS, Finding
from rmetric.audits.training import Seen, Training

__all__ = ["AUDITS", "KINDS", "Audit", "Auditor", "Finding", "Seen", "Training", "make_audits"]
