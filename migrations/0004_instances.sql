-- Instances, the capacity they use on nodes, and their ports.

CREATE TABLE IF NOT EXISTS instances (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    state VARCHAR(32) NOT NULL,
    error_message LONGTEXT,
    -- The request as JSON.
    spec LONGTEXT NOT NULL,
    -- The resolved disks as JSON.
    disks LONGTEXT NOT NULL,
    node_uuid VARCHAR(36),
    -- The capacity reserved on the node: CPUs, MB, GB. All 0 once it is released.
    claimed_cpus BIGINT NOT NULL,
    claimed_memory BIGINT NOT NULL,
    claimed_disk BIGINT NOT NULL,
    -- The observed and the desired power state.
    power_state VARCHAR(16) NOT NULL,
    power_wanted VARCHAR(16) NOT NULL,
    console_port BIGINT,
    vdi_port BIGINT,
    vdi_tls_port BIGINT,
    agent_state VARCHAR(255),
    agent_start_time DOUBLE,
    agent_system_boot_time DOUBLE,
    last_operation LONGTEXT,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS instances_by_name ON instances (name, namespace);
CREATE INDEX IF NOT EXISTS instances_by_namespace ON instances (namespace, state);
CREATE INDEX IF NOT EXISTS instances_by_node ON instances (node_uuid, state);
CREATE INDEX IF NOT EXISTS instances_by_state ON instances (state, updated);

-- The capacity reserved on each node in total, and the expected load of new instances.
CREATE TABLE IF NOT EXISTS node_claims (
    node_uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    cpus BIGINT NOT NULL,
    memory BIGINT NOT NULL,
    disk BIGINT NOT NULL,
    demand DOUBLE NOT NULL,
    demand_at DOUBLE NOT NULL,
    version BIGINT NOT NULL
);

-- Allocated TCP ports of VMs. Inserting the row allocates the port.
CREATE TABLE IF NOT EXISTS instance_ports (
    node_uuid VARCHAR(36) NOT NULL,
    port BIGINT NOT NULL,
    instance_uuid VARCHAR(36) NOT NULL,
    PRIMARY KEY (node_uuid, port)
);
CREATE INDEX IF NOT EXISTS instance_ports_by_instance ON instance_ports (instance_uuid);
