# SPDX-License-Identifier: Apache-2.0
"""The tables of the history, version by version: step n leads from version n to n + 1."""

MIGRATIONS = (
    """
    CREATE TABLE jobs (
      key TEXT PRIMARY KEY,
      cluster TEXT,
      job_id TEXT,
      run_dir TEXT NOT NULL,
      experiment TEXT NOT NULL,
      workload TEXT NOT NULL,
      size TEXT NOT NULL,
      dtype TEXT NOT NULL,
      gpu_type TEXT NOT NULL,
      scale INTEGER NOT NULL,
      campaign TEXT,
      submitted_s REAL NOT NULL,
      state TEXT NOT NULL,
      status TEXT NOT NULL,
      reason TEXT,
      exit_code INTEGER,
      signal INTEGER,
      nodes TEXT,
      restarts INTEGER NOT NULL,
      started_s REAL,
      ended_s REAL,
      checked_s REAL
    );
    CREATE INDEX jobs_by_time ON jobs (submitted_s);
    CREATE INDEX jobs_by_id ON jobs (job_id);
    """,
    # What is needed to resubmit a job that the infrastructure made fail, and to compare nodes.
    """
    ALTER TABLE jobs ADD COLUMN retries INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE jobs ADD COLUMN retry_of TEXT;
    ALTER TABLE jobs ADD COLUMN fault TEXT;
    ALTER TABLE jobs ADD COLUMN bad_nodes TEXT;
    ALTER TABLE jobs ADD COLUMN step_time_s REAL;
    CREATE UNIQUE INDEX jobs_by_repeated ON jobs (retry_of);
    """,
    # Jobs of more than one scheduler. Version 0.1 kept array indices only in ids and folder names.
    """
    ALTER TABLE jobs ADD COLUMN scheduler TEXT NOT NULL DEFAULT 'slurm';
    ALTER TABLE jobs ADD COLUMN array_index INTEGER;
    ALTER TABLE jobs ADD COLUMN base_dir TEXT;
    UPDATE jobs SET array_index = CAST(substr(job_id, instr(job_id, '_') + 1) AS INTEGER)
      WHERE job_id GLOB '[0-9]*_[0-9]*';
    UPDATE jobs SET base_dir = replace(run_dir, '.' || array_index || '/' || experiment, '/' || experiment)
      WHERE array_index IS NOT NULL;
    """,
    # Queries are in the order in which they began: clocks differ between machines, and are set back.
    """
    ALTER TABLE jobs ADD COLUMN query INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE queries (latest INTEGER NOT NULL);
    INSERT INTO queries VALUES (0);
    """,
    # A proxy is not taken for its model.
    """
    ALTER TABLE jobs ADD COLUMN proxy TEXT NOT NULL DEFAULT '';
    """,
    # Jobs that prepare a dataset or a checkpoint.
    """
    ALTER TABLE jobs ADD COLUMN prepares TEXT NOT NULL DEFAULT '';
    """,
    # A run on synthetic data is not taken for a fine-tuning. Before, all data were synthetic.
    """
    ALTER TABLE jobs ADD COLUMN data TEXT NOT NULL DEFAULT 'synthetic';
    ALTER TABLE jobs ADD COLUMN origin TEXT;
    """,
    # Groups of runs: those that the user named, and repeats; and whether a run is as fast as expected.
    """
    ALTER TABLE jobs ADD COLUMN label TEXT;
    ALTER TABLE jobs ADD COLUMN identity TEXT;
    ALTER TABLE jobs ADD COLUMN verdict TEXT;
    """,
    # Folders relative to the install root, so that it can be moved and copied.
    """
    UPDATE jobs SET run_dir = stored_of_earlier(run_dir), base_dir = stored_of_earlier(base_dir);
    """,
)
SCHEMA_VERSION = len(MIGRATIONS)
