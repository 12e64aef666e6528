-- Networks, addresses, interfaces, and the state of networks on nodes.

CREATE TABLE IF NOT EXISTS networks (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    namespace VARCHAR(255),
    netblock VARCHAR(18) NOT NULL,
    provide_dhcp BIGINT NOT NULL,
    provide_nat BIGINT NOT NULL,
    provide_dns BIGINT NOT NULL,
    vxid BIGINT NOT NULL,
    floating_gateway VARCHAR(15),
    state VARCHAR(16) NOT NULL,
    error_message LONGTEXT,
    -- Whether nodes should have the network. False once its deletion has started.
    wanted BIGINT NOT NULL,
    -- Incremented by every change that nodes must apply.
    generation BIGINT NOT NULL,
    last_operation VARCHAR(36),
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS networks_by_vxid ON networks (vxid);
CREATE INDEX IF NOT EXISTS networks_by_name ON networks (name, namespace);
CREATE INDEX IF NOT EXISTS networks_by_namespace ON networks (namespace, state);
CREATE INDEX IF NOT EXISTS networks_by_state ON networks (state, updated);

-- One row per allocated address. Inserting the row allocates it.
CREATE TABLE IF NOT EXISTS addresses (
    network_uuid VARCHAR(36) NOT NULL,
    address BIGINT NOT NULL,
    kind VARCHAR(16) NOT NULL,
    user_type VARCHAR(32),
    user_id VARCHAR(36),
    comment VARCHAR(255) NOT NULL,
    reserved_at DOUBLE NOT NULL,
    PRIMARY KEY (network_uuid, address)
);

-- Released addresses in quarantine. Their row in addresses remains until the quarantine ends.
CREATE TABLE IF NOT EXISTS address_halos (
    network_uuid VARCHAR(36) NOT NULL,
    address BIGINT NOT NULL,
    since DOUBLE NOT NULL,
    PRIMARY KEY (network_uuid, address)
);
CREATE INDEX IF NOT EXISTS address_halos_by_network_age ON address_halos (network_uuid, since);
CREATE INDEX IF NOT EXISTS address_halos_by_age ON address_halos (since);

-- The number of allocated addresses per block, to find free ones. A block without a row is empty.
CREATE TABLE IF NOT EXISTS address_blocks (
    network_uuid VARCHAR(36) NOT NULL,
    bits BIGINT NOT NULL,
    block BIGINT NOT NULL,
    taken BIGINT NOT NULL,
    PRIMARY KEY (network_uuid, bits, block)
);

CREATE TABLE IF NOT EXISTS interfaces (
    uuid VARCHAR(36) NOT NULL PRIMARY KEY,
    network_uuid VARCHAR(36) NOT NULL,
    instance_uuid VARCHAR(36) NOT NULL,
    namespace VARCHAR(255) NOT NULL,
    -- The name in DHCP and DNS.
    hostname VARCHAR(255) NOT NULL,
    node_uuid VARCHAR(36),
    macaddr VARCHAR(17) NOT NULL,
    ipv4 VARCHAR(15),
    floating VARCHAR(15),
    model VARCHAR(32) NOT NULL,
    position BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX IF NOT EXISTS interfaces_by_network ON interfaces (network_uuid, state);
CREATE INDEX IF NOT EXISTS interfaces_by_instance ON interfaces (instance_uuid, position);
CREATE INDEX IF NOT EXISTS interfaces_by_state ON interfaces (state, updated);

-- MAC addresses in use in the whole cluster.
CREATE TABLE IF NOT EXISTS hardware_addresses (
    macaddr VARCHAR(17) NOT NULL PRIMARY KEY,
    interface_uuid VARCHAR(36) NOT NULL
);

CREATE TABLE IF NOT EXISTS dns_entries (
    network_uuid VARCHAR(36) NOT NULL,
    name VARCHAR(255) NOT NULL,
    value VARCHAR(15) NOT NULL,
    PRIMARY KEY (network_uuid, name)
);

-- The state of a network on a node, as the node last reported it.
CREATE TABLE IF NOT EXISTS node_networks (
    node_uuid VARCHAR(36) NOT NULL,
    network_uuid VARCHAR(36) NOT NULL,
    generation BIGINT NOT NULL,
    error_message LONGTEXT,
    updated DOUBLE NOT NULL,
    PRIMARY KEY (node_uuid, network_uuid)
);
CREATE INDEX IF NOT EXISTS node_networks_by_network ON node_networks (network_uuid);
