# SPDX-License-Identifier: Apache-2.0
"""A real Slurm that keeps accounts: slurmdbd and a MariaDB beside the test cluster, below the same folder."""

import shutil
import socket
import subprocess
from dataclasses import dataclass

from slurm_cluster import SEARCHED, SlurmCluster

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb", "sacct", "sacctmgr")
HOW_TO_GET = (
    "Slurm's accounts are not installed: apt-get install slurmdbd mariadb-server-core mariadb-client-core "
    "(as .ci/run does)"
)
ACCOUNT = "bench"
# It keeps nothing that has to outlive it, and listens to nobody but users of its socket.
DATABASE_OPTIONS = (
    "--skip-networking",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
)
# Only jobs of accounts that are known are taken.
CONFIG = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={root}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations"""
DAEMON_CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={root}/slurmdbd.pid
LogFile={root}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_accounts
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


@dataclass
class ClusterWithAccounts(SlurmCluster):
    """Its controller forgets jobs soon after their end; then the accounts alone know them."""

    min_job_age_s: int = 2
    port: int = 0

    @property
    def environ(self) -> dict[str, str]:
        """The database's socket beside the rest, which slurmdbd.conf has no word for."""
        return {**super().environ, "MYSQL_UNIX_PORT": str(self.root / "database.socket")}

    def start_accounts(self) -> None:
        data, temporary = self.root / "database", self.root / "tmp"
        temporary.mkdir()
        user = f"--user={self._user()}"  # mariadbd does not run as root unless it is told to
        made = self.run(
            *("mariadb-install-db", "--no-defaults", user, f"--datadir={data}", "--skip-test-db"),
            *("--auth-root-authentication-method=normal", f"--tmpdir={temporary}", *DATABASE_OPTIONS),
        )
        assert made.returncode == 0, made.stdout + made.stderr
        self.spawn(
            *("mariadbd", "--no-defaults", user, f"--datadir={data}", f"--socket={self.root}/database.socket"),
            *(f"--pid-file={self.root}/mariadbd.pid", f"--tmpdir={temporary}", *DATABASE_OPTIONS),
        )
        self.wait_for("mariadbd", (self.root / "database.socket").exists)
        self.start_accounting_daemon()
        for added in (("cluster", "llmbtest"), ("account", ACCOUNT), ("user", self._user(), f"account={ACCOUNT}")):
            done = self.run("sacctmgr", "-i", "add", *added)
            assert done.returncode == 0, (added, done.stdout, done.stderr)

    def start_accounting_daemon(self) -> None:
        """Returns once it answers: a controller does not start for the first time without it."""
        self.spawn("slurmdbd", "-D")  # finds its configuration beside slurm.conf
        self.wait_for("slurmdbd", self._listens)

    def lose_the_end_of(self, job_id: str) -> None:
        """For the accounts the job runs for ever, as where a controller died before it told them of the end."""
        rows = f"UPDATE slurm_accounts.llmbtest_job_table SET state=1, time_end=0 WHERE id_job={int(job_id)}"
        done = self.run("mariadb", "--no-defaults", f"--socket={self.root}/database.socket", "--user=root", "-e", rows)
        assert done.returncode == 0, done.stderr

    def _configure_accounts(self, host: str, user: str, port: int) -> str:
        self.port = port
        file = self.root / "slurmdbd.conf"
        file.touch(0o600)
        file.write_text(DAEMON_CONFIG.format(root=self.root, host=host, user=user, port=port))
        return CONFIG.format(root=self.root, port=port)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _user(self) -> str:
        return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
