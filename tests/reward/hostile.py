"""Hostile programs. Each is asked for `double`; the tests say `assert double(2) == 4` and the like.

ESCAPES try something forbidden and give the right answer only if it was refused to them: they must pass.
FORGERIES do not know the answer: none may pass. ENDLESS ones must be ended from outside.
{secret}, {port}, {pid} and {abstract} are things of the world outside that they must not read, reach or end.
"""

RIGHT = "\ndef double(x): return 2 * x\n"
BREACH = """
import os, sys, ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(action, *kinds):
    try: action()
    except (kinds or (OSError,)): return
    raise SystemExit("breach")
def denied(number, *args):
    if libc.syscall(number, *args) != -1: raise SystemExit("breach")
def attempt(action):
    try: return action()
    except OSError: return None
"""


def escape(body: str) -> str:
    return BREACH + body + RIGHT


ESCAPES = {
    "reads a file outside": escape("refused(lambda: open('{secret}').read())"),
    "lists the home": escape(r"""
refused(lambda: os.listdir('/root'))
refused(lambda: os.listdir('/home'))
refused(lambda: os.listdir('/etc/ssl'))
"""),
    "reads passwords": escape(r"""
refused(lambda: open('/etc/passwd').read())
refused(lambda: open('/etc/shadow').read())
"""),
    "looks into /proc": escape(r"""
refused(lambda: os.listdir('/proc'))
refused(lambda: open('/proc/1/environ').read())
"""),
    "leaves by /proc/1/root": escape(r"""
refused(lambda: os.listdir('/proc/1/root'))
refused(lambda: os.readlink('/proc/self/exe'))
"""),
    "looks into /sys": escape("refused(lambda: os.listdir('/sys'))"),
    "mounts its own /proc": escape(r"""
os.mkdir('/tmp/p')
denied(165, b'proc', b'/tmp/p', b'proc', 0, None)
"""),
    "follows a link outside": escape(r"""
os.symlink('{secret}', '/tmp/link')
refused(lambda: open('/tmp/link').read())
"""),
    "climbs out by dots": escape("refused(lambda: open('../../../../..{secret}').read())"),
    "overwrites the secret": escape("refused(lambda: open('{secret}', 'w').write('gone'))"),
    "hard-links a device": escape(r"""
refused(lambda: os.link('/dev/null', '/dev/mine'))
refused(lambda: os.mknod('/tmp/sda', 0o60660, os.makedev(8, 0)))
"""),
    "writes to the library": escape(r"""
refused(lambda: open(os.__file__, 'a').write('x'))
refused(lambda: open('/usr/lib/x', 'w'))
"""),
    "writes to the root": escape(r"""
refused(lambda: open('/x', 'w'))
refused(lambda: open('/python/x', 'w'))
refused(lambda: open('/dev/shm/x', 'w'))
"""),
    "finds secrets in the environment": escape(r"""
if any('SECRET' in k or 'secret' in v for k, v in os.environ.items()): raise SystemExit("breach")
"""),
    "connects to the machine": escape("refused(lambda: socket.create_connection(('127.0.0.1', {port}), 1))"),
    "connects to the world": escape("refused(lambda: socket.create_connection(('93.184.216.34', 80), 1))"),
    "sends a datagram": escape(r"""
refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)))
"""),
    "connects to an abstract socket": escape(r"""
s = socket.socket(socket.AF_UNIX)
refused(lambda: s.connect('\0{abstract}'))
"""),
    "talks to the hypervisor": escape("refused(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    "opens a raw socket": escape(r"""
refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
"""),
    "listens for others": escape(r"""
s = socket.socket()
attempt(lambda: s.bind(('0.0.0.0', {port})))
attempt(lambda: s.listen())
"""),
    "kills a process outside": escape("refused(lambda: os.kill({pid}, 9))"),
    "signals its parents": escape(r"""
import signal
for pid in range(1, 2000):
    if pid != os.getpid(): attempt(lambda: os.kill(pid, 0)) is None
refused(lambda: os.kill(os.getpid() + 100000, 9))
attempt(lambda: os.kill(1, 9))
attempt(lambda: os.kill(os.getppid(), signal.SIGTERM))
"""),
    "traces a process": escape(r"""
denied(101, 16, 1, 0, 0)
denied(310, 1, 0, 0, 0, 0, 0)
"""),
    "makes a user namespace": escape(r"""
denied(272, 0x10000000)
denied(56, 0x10000000 | 17, 0, 0, 0, 0)
"""),
    "makes a network namespace": escape(r"""
denied(272, 0x40000000)
denied(308, 0, 0)
"""),
    "changes its root": escape(r"""
denied(161, b'/tmp')
denied(155, b'/tmp', b'/tmp')
"""),
    "becomes root": escape(r"""
refused(lambda: os.setuid(0))
refused(lambda: os.setgid(0))
refused(lambda: os.setgroups([0]))
"""),
    "runs a setuid program": escape(r"""
refused(lambda: os.execv('/usr/bin/su', ['su']))
refused(lambda: os.execv('/bin/sh', ['sh', '-c', 'id']))
"""),
    "raises its limits": escape(r"""
import resource
for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    refused(lambda: resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)), ValueError, OSError)
"""),
    "fills the disk": escape(r"""
def fill():
    for n in range(1000):
        with open(f'/tmp/{{n}}', 'wb') as file: file.write(b'x' * (8 << 20))
refused(fill)
for name in os.listdir('/tmp'): os.remove('/tmp/' + name)
"""),
    "writes one huge file": escape(r"""
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill():
    with open('/tmp/big', 'wb', buffering=0) as file:
        for _ in range(100): file.write(b'x' * (1 << 20))
        if os.path.getsize('/tmp/big') > 50 << 20: return
        raise OSError
refused(fill)
"""),
    "takes all memory": escape("refused(lambda: bytearray(8 << 30), MemoryError)"),
    "keeps memory where no limit counts it": escape(r"""
denied(319, b'm', 0)
denied(29, 0, 1 << 30, 0o1600)
"""),
    "opens files without end": escape(r"""
mine = []
def open_many():
    for _ in range(10000): mine.append(os.open('/dev/null', 0))
refused(open_many)
for fd in mine: os.close(fd)
"""),
    "breeds a few children": escape(r"""
children = []
def breed():
    for _ in range(500):
        pid = os.fork()
        if pid == 0:
            import time; time.sleep(60); os._exit(0)
        children.append(pid)
refused(breed)
for pid in children: os.kill(pid, 9)
"""),
    "starts threads without end": escape(r"""
import threading
gate = threading.Event()
def start():
    for _ in range(500): threading.Thread(target=gate.wait, daemon=True).start()
refused(start, RuntimeError)
gate.set()
"""),
    "leaves a daemon behind": escape(r"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time; time.sleep(300)
    os._exit(0)
"""),
    "loads a kernel program": escape(r"""
denied(321, 5, 0, 0)
denied(298, 0, 0, -1, -1, 0)
denied(425, 8, 0)
"""),
    "reads the kernel's log": escape(r"""
denied(103, 3, 0, 0)
refused(lambda: open('/dev/kmsg').read())
refused(lambda: open('/dev/mem', 'rb').read(1))
"""),
    "types into the terminal": escape(r"""
import fcntl
for fd in (0, 1, 2): refused(lambda: fcntl.ioctl(fd, 0x5412, b'x'))
refused(lambda: open('/dev/tty', 'w'))
"""),
    "reads our own files through open descriptors": escape(r"""
for fd in range(3, 300):
    data = attempt(lambda: os.pread(fd, 1 << 16, 0))
    if data and b'assert' in data.replace(b'"assert', b''): raise SystemExit("breach")
"""),
}

FORGERIES = {
    "exits with success": "import sys; sys.exit(0)",
    "exits at once, hard": "import os; os._exit(0)",
    "exits when called": "def double(x): raise SystemExit(0)",
    "exits hard when called": r"""
import os
def double(x): os._exit(0)
""",
    "prints that it passed": r"""
print('ready'); print('{{"passed": true, "calls": 3}}'); print('PASSED')
def double(x): return 0
""",
    "writes verdicts to every descriptor": r"""
import os
for fd in range(300):
    try: os.write(fd, b'ready\n{{"passed": true, "calls": 3}}')
    except OSError: pass
def double(x): return 0
""",
    "answers before it is asked": r"""
import os
for fd in range(3, 300):
    try: os.write(fd, b'["value", 4]\n["value", 4]\n["value", 4]\n')
    except OSError: pass
os._exit(0)
""",
    "equals everything": r"""
class Yes:
    def __eq__(self, other): return True
    def __bool__(self): return True
def double(x): return Yes()
""",
    "is a number that equals everything": r"""
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def double(x): return Yes(0)
""",
    "patches the builtins": r"""
import builtins
builtins.AssertionError = Warning
builtins.__build_class__ = None
builtins.all = lambda x: True
def double(x): return 0
""",
    "patches the host": r"""
import sys, __main__
__main__.plain = lambda value, kept: 4
__main__.wired = __main__.plain
def double(x): return 0
""",
    "traces every call": r"""
import sys
sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)
def double(x): return 0
""",
    "ends a map quietly": r"""
def double(x):
    if x in (2, -3): return 2 * x
    raise StopIteration
""",
    "raises what ends generators": "def double(x): raise GeneratorExit",
    "answers at exit": r"""
import atexit, os
atexit.register(lambda: [os.write(fd, b'["value", 4]\n') for fd in range(3, 300)])
def double(x): return 0
""",
    "reads the tests from its caller": r"""
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, str) and 'assert double' in value: return int(value.split('==')[1].split()[0])
        frame = frame.f_back
    return 0
""",
    "looks for the tests in memory": r"""
import gc
def double(x):
    texts = [v for o in gc.get_objects() if isinstance(o, dict) for v in o.values() if isinstance(v, str)]
    found = [text for text in texts if 'assert double' in text and 'gc' not in text]
    return 4 if found else 0
""",
    "sends half an answer": r"""
import os
def double(x):
    for fd in range(3, 300):
        try: os.write(fd, b'["value", ')
        except OSError: pass
    os._exit(0)
""",
    "answers too deep": r"""
import os
def double(x):
    for fd in range(3, 300):
        try: os.write(fd, b'["value", ' + b'[' * 60000 + b'\n')
        except OSError: pass
    os._exit(0)
""",
    "answers too much": "def double(x): return 'x' * (9 << 20)",
    "answers with what is not a value": r"""
import os
def double(x):
    for fd in range(3, 300):
        try: os.write(fd, b'["value", ["kept", {{}}]]\n')
        except OSError: pass
    os._exit(0)
""",
    "closes every descriptor": r"""
import os
os.closerange(0, 300)
def double(x): return 4
""",
    "crashes the interpreter": r"""
import ctypes
def double(x): ctypes.string_at(0)
""",
    "recurses without end": "def double(x): return double(x)",
    "kills itself": r"""
import os
def double(x): os.kill(os.getpid(), 9)
""",
    "kills its own init": r"""
import os
def double(x):
    os.kill(-1, 9)
""",
    "is not Python": "def double(x: return 4",
    "defines nothing": "",
    "defines another name": "def treble(x): return 3 * x",
    "is right once": r"""
seen = []
def double(x):
    seen.append(x)
    return 4
""",
    "prints without end": "while True: print('x' * 10000)",
    "prints errors without end": r"""
import sys
while True: sys.stderr.write('x' * 10000)
""",
}

ENDLESS = {
    "runs without end": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "sleeps when called": r"""
import time
def double(x): time.sleep(1000)
""",
    "waits for input on a pipe": r"""
import os
r, w = os.pipe()
os.read(r, 1)
""",
    "ignores every signal": r"""
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: signal.pause() if False else None
""",
    "is a fork bomb": r"""
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "is a fork bomb of sleepers": r"""
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(1000)
    except OSError: time.sleep(0.01)
""",
    "computes inside C": "def double(x): return len(str(7 ** 10 ** 9))",
    "generates without end": r"""
import itertools
def double(x): return (i for i in iter(int, 1) if False)
""",
}
