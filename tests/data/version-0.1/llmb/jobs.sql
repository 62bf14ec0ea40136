PRAGMA application_id = 1819045218;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
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
    , retries INTEGER NOT NULL DEFAULT 0, retry_of TEXT, fault TEXT, bad_nodes TEXT, step_time_s REAL);
INSERT INTO "jobs" VALUES('retried',NULL,'1','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298745/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.79529874534503269194e+09,'FAILED','failed','rank 0 on node1 failed: DistBackendError: NCCL error in: x.cpp:4, unhandled system error, after 5 of 10 steps',1,NULL,'node1',0,1795298746.0,1795298749.0,1.79529874974088501926e+09,2,NULL,'nccl_system_error','node1',NULL);
INSERT INTO "jobs" VALUES('array.0',NULL,'2_0','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298746.0/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.79529874544896507265e+09,'COMPLETED','success',NULL,0,NULL,'node1',0,1795298746.0,1795298751.0,1.79529875210746645928e+09,0,NULL,NULL,NULL,0.5);
INSERT INTO "jobs" VALUES('array.1',NULL,'2_1','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298746.1/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.79529874544899463659e+09,'FAILED','failed','the workers ended with exit code 3, after 0 of 10 steps',3,NULL,'node1',0,1795298746.0,1795298749.0,1.79529875104909229276e+09,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('array.2',NULL,'2_2','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298746.2/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.79529874544900274269e+09,'COMPLETED','success',NULL,0,NULL,'node1',0,1795298746.0,1795298751.0,1.79529875210746645928e+09,0,NULL,NULL,NULL,0.5);
INSERT INTO "jobs" VALUES('held',NULL,'3','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298747/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.7952987455650081635e+09,'PENDING','queued','held; ''scontrol release'' lets it go (JobHeldUser)',NULL,NULL,NULL,0,NULL,NULL,1.79529882360152387614e+09,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('20261121-220547-d2e11e-0001',NULL,'6','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus2_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus2_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298748/pretrain_llama3.1_tiny_fp32_gpus2_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus2_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',2,'20261121-220547-d2e11e',1.79529874812106180186e+09,'COMPLETED','success',NULL,0,NULL,'node1',0,1795298749.0,1795298777.0,1.79529877779324221606e+09,0,NULL,NULL,NULL,3.69760684000084438594e-01);
INSERT INTO "jobs" VALUES('20261121-220547-d2e11e-0002',NULL,'7','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298748/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,'20261121-220547-d2e11e',1.79529874827325296397e+09,'COMPLETED','success',NULL,0,NULL,'node1',0,1795298749.0,1795298775.0,1.7952987763779084682e+09,0,NULL,NULL,NULL,6.07668132999947374628e-01);
INSERT INTO "jobs" VALUES('bridge',NULL,'8','/cluster/bench/workloads/finetune_llama3/experiments/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_1795298748/lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32','lora_llama3_70b_bf16_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32','finetune_llama3','70b','bf16','h100',8,NULL,1.79529874854522180551e+09,'COMPLETED','success',NULL,0,NULL,'node2',0,1795298749.0,1795298754.0,1795298754.25504,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('retried#2',NULL,'9','/cluster/bench/workloads/pretrain_llama3.1/experiments/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8_1795298745/pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8','pretrain_llama3.1','tiny','fp32','cpu',1,NULL,1.79529874986451935771e+09,'COMPLETED','success',NULL,0,NULL,'node2',0,1795298755.0,1795298760.0,1.79529876059161329271e+09,1,'retried',NULL,NULL,0.5);
CREATE INDEX jobs_by_time ON jobs (submitted_s);
CREATE INDEX jobs_by_id ON jobs (job_id);
CREATE UNIQUE INDEX jobs_by_repeated ON jobs (retry_of);
COMMIT;
