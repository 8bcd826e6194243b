"""Waits that last too long: what each rank waits for, which rank reports it, and when the job ends.
Begin with `watchdog`. May import api and messages.
"""

from dearmpi.comm.watchdog.watchdog import StallLimits as StallLimits
