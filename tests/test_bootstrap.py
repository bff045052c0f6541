"""`deploy/bootstrap.sh`, run as a newcomer runs it, on machines made of a few stand-in commands.

A machine is a directory that is the whole PATH: links to the ordinary tools, and small scripts in
place of python3, pip, apt-get and sudo that write down how they were called. Nothing is
downloaded, and nothing outside pytest's temporary directory is touched.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "deploy" / "bootstrap.sh"
CI_RUN = SCRIPT.parent.parent / ".ci" / "run"

TOOLS = (
    "cat chmod cp date dirname echo env find flock grep id kill mkdir mktemp mv nproc printf "
    "readlink rm sed setsid sh sha256sum sleep stat tail touch"
)

PATIENCE_S = 20.0

PYTHON = """
case "$1 $2" in
    "-m venv")
        echo "venv" >>"$CALLS"
        mkdir -p "$3/bin" "$3/lib" && cp "$0" "$3/bin/python" && echo "$3" >"$3/bin/activate"
        touch "$3/lib/libggml-cpu-any.so"
        printf '#!/bin/sh\\necho "numaserve $*"\\n' >"$3/bin/numaserve"
        chmod +x "$3/bin/numaserve" ;;
    "-m pip")
        shift 2 && echo "pip $*" >>"$CALLS" && echo "CMAKE_ARGS=$CMAKE_ARGS" && eval "$PIP" ;;
    "-c import ctypes, sys; ctypes.CDLL(sys.argv[1])") case $MISSING in *"$3"*) exit 1 ;; esac ;;
    "-c import ensurepip, venv") case $MISSING in *venv*) exit 1 ;; esac ;;
    "-c import pip") ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

ONE_CPU_ONLY = 'rm -f "${0%/bin/*}"/lib/*.so'
"""A pip that leaves no separate library per kind of CPU."""


@dataclass
class Machine:
    """A PATH of its own, and a checkout to prepare on it."""

    checkout: Path
    bin: Path
    calls_file: Path
    variables: dict[str, str]

    def command(self, name: str, body: str) -> None:
        """Install a command; `$CALLS` is where it may write down that it was called."""
        file = self.bin / name
        file.unlink(missing_ok=True)
        file.write_text("#!/bin/sh\n" + body)
        file.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.checkout / "deploy" / "bootstrap.sh", *arguments],
            env={"PATH": str(self.bin), **self.variables, **variables},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **variables) as process:
            output, errors = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is missing, for a user who is not root."""
    checkout, commands = tmp_path / "my checkout", tmp_path / "bin"
    (checkout / "deploy").mkdir(parents=True)
    commands.mkdir()
    shutil.copy(SCRIPT, checkout / "deploy")
    (checkout / "pyproject.toml").write_text("[project]\n")
    for name in TOOLS.split():
        if found := shutil.which(name):
            (commands / name).symlink_to(found)
    variables = {
        "CALLS": str(tmp_path / "calls"),
        "REAL_PYTHON": sys.executable,
        "MISSING": "",
        "PIP": ":",
    }
    made = Machine(checkout, commands, tmp_path / "calls", variables)
    for name in ("numactl", "gcc", "g++"):
        made.command(name, "")
    made.command("python3", PYTHON)
    made.command("id", "echo 1000")
    made.command("sudo", 'echo "sudo $*" >>"$CALLS"\n[ "$1" = -n ] || "$@"\n')
    made.command("apt-get", 'echo "apt-get $*" >>"$CALLS"\n')
    return made


def wait_until(file: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"{file} never held {text!r}"
        time.sleep(0.02)


@pytest.mark.parametrize("script", [SCRIPT, CI_RUN], ids=lambda path: path.name)
def test_the_scripts_are_valid_for_any_posix_shell(script: Path) -> None:
    assert os.access(script, os.X_OK)
    for checker in (["sh", "-n"], ["shellcheck"]):
        if found := shutil.which(checker[0]):
            subprocess.run([found, *checker[1:], script], check=True)


def test_help_needs_nothing_but_a_shell(machine: Machine) -> None:
    result = machine.run("--help")
    assert (0, []) == (result.returncode, machine.calls)
    assert "deploy/bootstrap.sh up" in result.stdout
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize("arguments", [(), ("down",), ("--port", "8080")])
def test_anything_else_is_wrong_usage(machine: Machine, arguments: tuple[str, ...]) -> None:
    result = machine.run(*arguments)
    assert (2, "") == (result.returncode, result.stdout)
    assert "Usage:" in result.stderr


def test_up_prepares_and_becomes_the_server(machine: Machine) -> None:
    """Also from another directory, and with a blank in the path, as here."""
    result = machine.run("up", "--port", "0", "--model", "a b")
    assert (0, "numaserve up --port 0 --model a b\n") == (result.returncode, result.stdout)
    assert ["venv", *pip_calls(".")] == machine.calls


def test_test_installs_the_test_tools_and_lets_pytest_speak_last(machine: Machine) -> None:
    for name in ("ruff", "mypy", "lint-imports", "pytest"):
        machine.command(name, f"echo {name} $*\n")
    result = machine.run("test", "-k", "a b")
    expected = (
        "ruff check\nruff format --check\nmypy gateway replica tests\nlint-imports\npytest -k a b"
    )
    assert (0, expected) == (result.returncode, result.stdout.strip())
    assert ["venv", *pip_calls(".[test]")] == machine.calls


def test_a_failed_check_fails_the_run_after_the_tests_have_run(machine: Machine) -> None:
    for name in ("ruff", "lint-imports"):
        machine.command(name, "")
    machine.command("mypy", "exit 3\n")
    machine.command("pytest", "echo 12 passed\nexit ${PYTEST_CODE:-0}\n")
    result = machine.run("test")
    assert (1, "12 passed\n") == (result.returncode, result.stdout)
    assert "'mypy gateway replica tests'" in result.stderr
    assert 5 == machine.run("test", PYTEST_CODE="5").returncode


def test_nobody_is_asked_for_root_when_nothing_is_missing(machine: Machine) -> None:
    machine.run("up")
    assert not [call for call in machine.calls if call.startswith(("sudo", "apt-get"))]


def test_a_second_call_installs_nothing(machine: Machine) -> None:
    machine.run("up")
    before = machine.calls
    result = machine.run("up", "again")
    assert ("numaserve up again\n", "") == (result.stdout, result.stderr)
    assert before == machine.calls


def test_what_the_tests_need_serves_too_but_not_the_other_way_round(machine: Machine) -> None:
    machine.command("pytest", "")
    machine.run("up")
    machine.run("test")
    assert ["venv", *pip_calls("."), *pip_calls(".[test]")] == machine.calls
    machine.run("up")
    assert ["venv", *pip_calls("."), *pip_calls(".[test]")] == machine.calls


def test_changed_requirements_are_installed_without_starting_afresh(machine: Machine) -> None:
    machine.run("up")
    (machine.checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    machine.run("up")
    assert ["venv", *pip_calls("."), *pip_calls(".")] == machine.calls


def test_a_moved_checkout_starts_afresh(machine: Machine) -> None:
    """The commands in a virtual environment name the directory it was made in."""
    machine.run("up")
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("elsewhere"))
    machine.run("up")
    assert ["venv", *pip_calls("."), "venv", *pip_calls(".")] == machine.calls


def test_a_failing_pip_shows_its_log_and_is_called_again(machine: Machine) -> None:
    result = machine.run("up", PIP="echo No matching distribution; exit 1")
    assert (1, "") == (result.returncode, result.stdout)
    assert "No matching distribution" in result.stderr
    assert str(machine.checkout / ".venv/bootstrap.log") in result.stderr
    assert 0 == machine.run("up").returncode
    assert ["venv", *pip_calls("."), *pip_calls(".")] == machine.calls


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_call_ends_its_children(machine: Machine, number: signal.Signals) -> None:
    log = machine.checkout / ".venv" / "bootstrap.log"
    process = machine.start("up", PIP="sleep 60 & echo child $!; sleep 60")
    wait_until(log, "child ")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (130 if number == signal.SIGINT else 143) == process.returncode
    assert "interrupted" in errors
    child = log.read_text().split("child ")[1].split()[0]
    assert is_gone(child), "a compiler would go on for minutes"


def test_what_an_interrupted_call_left_is_not_trusted(machine: Machine) -> None:
    process = machine.start("up", PIP="echo halfway; sleep 60")
    wait_until(machine.checkout / ".venv" / "bootstrap.log", "halfway")
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert 0 == machine.run("up").returncode
    assert ["venv", *pip_calls("."), "venv", *pip_calls(".")] == machine.calls


def test_going_back_to_the_old_requirements_does_not_revive_a_broken_state(
    machine: Machine,
) -> None:
    machine.run("up")
    requirements = machine.checkout / "pyproject.toml"
    requirements.write_text("[project]\nname = 'other'\n")
    process = machine.start("up", PIP="echo halfway; sleep 60")
    wait_until(machine.checkout / ".venv" / "bootstrap.log", "halfway")
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    requirements.write_text("[project]\n")
    machine.run("up")
    assert ["venv", *pip_calls(".")] == machine.calls[-2:]


def test_a_running_server_does_not_hold_the_lock(machine: Machine) -> None:
    """Or a second call would wait for as long as the server runs."""
    show = r'printf "#!/bin/sh\nls -l /proc/self/fd" >"${0%/*}/numaserve"'
    machine.command("ls", f"exec {shutil.which('ls')} $*\n")
    assert "bootstrap.lock" not in machine.run("up", PIP=show).stdout


def test_two_calls_at_once_install_once(machine: Machine) -> None:
    first = machine.start("up", PIP="echo at work; sleep 2")
    wait_until(machine.checkout / ".venv" / "bootstrap.log", "at work")
    second = machine.run("up")
    assert "waiting" in second.stderr
    assert ("numaserve up\n", "numaserve up\n") == (first.communicate()[0], second.stdout)
    assert ["venv", *pip_calls(".")] == machine.calls


def test_the_flags_llama_cpp_is_built_with_can_be_replaced(machine: Machine) -> None:
    log = machine.checkout / ".venv" / "bootstrap.log"
    machine.run("up")
    assert "-DGGML_CPU_ALL_VARIANTS=ON" in log.read_text()
    shutil.rmtree(log.parent)
    machine.run("up", CMAKE_ARGS="-DGGML_NATIVE=ON", PIP=ONE_CPU_ONLY)
    assert "CMAKE_ARGS=-DGGML_NATIVE=ON\n" == log.read_text()
    assert ["venv", *pip_calls(".")] == machine.calls[2:], "one CPU was wanted, and one it is"


def test_a_cached_build_for_one_cpu_is_not_taken(machine: Machine) -> None:
    """pip's cache does not know with which flags a wheel was built."""
    result = machine.run("up", PIP=ONE_CPU_ONLY)
    assert 0 == result.returncode, result.stderr
    assert "--no-cache-dir llama-cpp-python==" in machine.calls[-1]


def test_missing_packages_are_installed_with_sudo(machine: Machine) -> None:
    (machine.bin / "numactl").unlink()
    (machine.bin / "g++").unlink()
    arrive = 'cp "${0%/*}/gcc" "${0%/*}/numactl"; cp "${0%/*}/gcc" "${0%/*}/g++"\n'
    machine.command("apt-get", f'echo "apt-get $*" >>"$CALLS"\n{arrive}')
    result = machine.run("up")
    assert 0 == result.returncode, result.stderr
    update, wanted = [call for call in machine.calls if call.startswith("apt-get")]
    assert update.endswith("update")
    assert wanted.endswith("install -y --no-install-recommends numactl g++")
    assert any(call.startswith("sudo env") for call in machine.calls)


def test_root_needs_no_sudo(machine: Machine) -> None:
    machine.command("id", "echo 0")
    machine.command("apt-get", 'echo "apt-get $*" >>"$CALLS"\ncp "$0" "${0%/*}/numactl"\n')
    (machine.bin / "numactl").unlink()
    assert 0 == machine.run("up").returncode
    assert not [call for call in machine.calls if call.startswith("sudo")]


@pytest.mark.parametrize("sudo", ["absent", "asks for a password"])
def test_without_root_it_says_what_root_has_to_do(machine: Machine, sudo: str) -> None:
    if sudo == "absent":
        (machine.bin / "sudo").unlink()
    else:
        machine.command("sudo", "exit 1\n")
    result = machine.run("up", MISSING="libnuma.so.1 libgomp.so.1 venv")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = f"libnuma1 libgomp1 python{version}-venv"
    assert (1, []) == (result.returncode, machine.calls)
    assert f"apt-get install -y --no-install-recommends {names}\n" in result.stderr


def test_a_package_that_does_not_come_is_named(machine: Machine) -> None:
    result = machine.run("up", MISSING="libnuma.so.1")
    assert 1 == result.returncode
    assert "still not found: libnuma1" in result.stderr


def test_without_apt_it_names_what_is_needed(machine: Machine) -> None:
    (machine.bin / "apt-get").unlink()
    (machine.bin / "gcc").unlink()
    result = machine.run("up")
    assert (1, []) == (result.returncode, machine.calls)
    assert "missing here, by their Debian names: gcc." in result.stderr


def test_an_installed_server_whose_numactl_is_gone_does_not_start(machine: Machine) -> None:
    machine.run("up")
    (machine.bin / "numactl").unlink()
    machine.command("sudo", "exit 1\n")
    assert "no-install-recommends numactl\n" in machine.run("up").stderr


def test_without_python_it_says_which_one_is_needed(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    result = machine.run("up")
    assert (1, "") == (result.returncode, result.stdout)
    assert "Python 3.11 or newer is needed: there is no python3;" in result.stderr


def test_an_old_python_is_not_used_when_a_newer_one_is_there(machine: Machine) -> None:
    machine.command("python3", "echo 3.10\n")
    result = machine.run("up")
    assert 1 == result.returncode
    assert "needed: python3 is 3.10; install one" in result.stderr
    machine.command("python3.12", PYTHON)
    assert 0 == machine.run("up").returncode


def pip_calls(requirement: str) -> list[str]:
    return [
        f"pip install --verbose --no-input --disable-pip-version-check -e {requirement}",
    ]


def is_gone(pid: str) -> bool:
    """Whether a process has ended, at the latest within a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
