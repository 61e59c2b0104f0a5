"""One torch thread: two threads on a contended two-core machine were 30 times slower and change the last bit."""

from tests import arithmetics

arithmetics.switch_on()
