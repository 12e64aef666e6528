//! All settings with name, type, default and description, in one table.
//!
//! The environment (`MUSTER_<NAME>`) takes precedence over the config file (`<NAME> = value`), and the file over the
//! default. The executable reads them; this module parses and validates them and records the source of each value.
//! See docs/decisions/0010 for the defaults.

mod checks;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::address::InterfaceAddress;
use crate::backup::BackupRecipient;
use crate::instance::FencingPolicy;
use crate::key::{MAX_SECRET_BYTES, Secret};
use crate::quota::NumberOrPercent;
use crate::spec::{DiskBus, ValidationMode};

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// The least severe messages that a part of the program logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// The source of a setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    Default,
    File { line: usize },
    Environment,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { line } => write!(f, "config file, line {line}"),
            Self::Environment => f.write_str("environment"),
        }
    }
}

/// The effective value of a setting, for `muster config`.
#[derive(Debug, Clone)]
pub struct EffectiveSetting {
    pub name: &'static str,
    /// The value; masked if it is a secret.
    pub value: String,
    pub source: SettingSource,
    pub description: &'static str,
}

trait ParseSetting: Sized {
    fn parse(text: &str) -> Result<Self, String>;
}

macro_rules! parse_setting {
    ($($type:ty: $what:literal),+) => {$(
        impl ParseSetting for $type {
            fn parse(text: &str) -> Result<Self, String> {
                <$type>::from_str(text).map_err(|_| format!("{text:?} is not {}", $what))
            }
        }
    )+};
}
parse_setting!(
    u64: "a whole number of at least 0",
    i64: "a whole number",
    u16: "a port number",
    Ipv4Addr: "an IPv4 address",
    NumberOrPercent: "a whole number, or a percentage from 1% to 100%"
);

impl ParseSetting for f64 {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().ok().filter(|n: &f64| n.is_finite()).ok_or_else(|| format!("{text:?} is not a number"))
    }
}

impl ParseSetting for bool {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" | "" => Ok(false),
            _ => Err(format!("{text:?} is neither true nor false")),
        }
    }
}

impl ParseSetting for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl ParseSetting for Secret {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self::new(text))
    }
}

/// An empty value means that the setting is not set.
impl ParseSetting for Option<Ipv4Addr> {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { Ipv4Addr::parse(text).map(Some) }
    }
}

/// An empty value means that the setting is not set.
impl ParseSetting for Option<BackupRecipient> {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
    }
}

/// An empty value means that the setting is not set.
impl ParseSetting for Option<InterfaceAddress> {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
    }
}

impl ParseSetting for DiskBus {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

impl ParseSetting for ValidationMode {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "warn" => Ok(Self::Warn),
            "enforce" => Ok(Self::Enforce),
            _ => Err(format!("{text:?} must be off, warn or enforce")),
        }
    }
}

impl ParseSetting for FencingPolicy {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

impl ParseSetting for LogFormat {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("{text:?} is neither text nor json")),
        }
    }
}

impl ParseSetting for LogLevel {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "off" => Ok(Self::Off),
            "error" => Ok(Self::Error),
            "warn" | "warning" => Ok(Self::Warn),
            "info" => Ok(Self::Info),
            "debug" => Ok(Self::Debug),
            "trace" => Ok(Self::Trace),
            _ => Err(format!("{text:?} must be off, error, warn, info, debug or trace")),
        }
    }
}

macro_rules! settings {
    ($($field:ident: $type:ty = $name:literal, $default:literal, $description:literal;)+) => {
        /// The effective settings.
        #[derive(Debug, Clone)]
        pub struct Settings {
            $(#[doc = $description] pub $field: $type,)+
            /// The values with their sources, in table order.
            pub effective: Vec<EffectiveSetting>,
        }

        impl Settings {
            /// All names, in table order.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// Parses and validates all values. `file` and `environment` hold raw texts by setting name.
            pub fn new(
                file: &BTreeMap<String, (usize, String)>,
                environment: &BTreeMap<String, String>,
            ) -> Result<Self, String> {
                let mut effective = Vec::with_capacity(Self::NAMES.len());
                $(
                    let (raw, source) = match (environment.get($name), file.get($name)) {
                        (Some(text), _) => (text.as_str(), SettingSource::Environment),
                        (None, Some((line, text))) => (text.as_str(), SettingSource::File { line: *line }),
                        (None, None) => ($default, SettingSource::Default),
                    };
                    let $field = <$type as ParseSetting>::parse(raw).map_err(|why| format!("{} ({source}): {why}", $name))?;
                    effective.push(EffectiveSetting { name: $name, value: masked($name, raw), source, description: $description });
                )+
                let mut settings = Self { $($field,)+ effective };
                settings.check()?;
                settings.complete_database_url();
                Ok(settings)
            }
        }
    };
}

settings! {
    database_url: Secret = "DATABASE_URL", "", "sqlite:PATH or mysql://USER:PASSWORD@HOST:PORT/NAME, with several HOST:PORT separated by commas in the order of preference; empty: SQLite in the data directory";
    system_key: Secret = "SYSTEM_KEY", "", "secret of the initial key deploy of namespace system; empty: generated at the first start";
    auth_secret_seed: Secret = "AUTH_SECRET_SEED", "", "secret that signs tokens, the same on every node; empty: generated in the data directory";
    tls_certificate: String = "TLS_CERTIFICATE", "", "PEM certificate chain; with TLS_PRIVATE_KEY the API is served over TLS";
    tls_private_key: String = "TLS_PRIVATE_KEY", "", "path of the PEM private key of TLS_CERTIFICATE";
    log_format: LogFormat = "LOG_FORMAT", "text", "text or json";
    api_token_duration: u64 = "API_TOKEN_DURATION", "15", "lifetime of tokens in minutes";
    zone: String = "ZONE", "shakenfist", "issuer of tokens and DNS domain";
    api_validation_mode: ValidationMode = "API_VALIDATION_MODE", "enforce", "off, warn or enforce";
    api_max_request_body_bytes: u64 = "API_MAX_REQUEST_BODY_BYTES", "1048576", "maximum size of a JSON request body";
    api_max_body_memory_mb: u64 = "API_MAX_BODY_MEMORY_MB", "64", "memory in MiB for all request bodies in flight, a quarter of it for those without a token; each namespace and each address gets as much as it leaves free, and further bodies are rejected with status 503";
    api_max_connections: u64 = "API_MAX_CONNECTIONS", "4096", "maximum number of concurrent connections; further ones wait";
    api_port: u16 = "API_PORT", "13000", "port of the API unless --listen specifies one";
    api_timeout: u64 = "API_TIMEOUT", "30", "timeout for receiving a request, in seconds";
    api_async_wait: u64 = "API_ASYNC_WAIT", "60", "seconds that an API call waits for internal operations";
    api_drain_grace: u64 = "API_DRAIN_GRACE", "25", "seconds that the API continues to serve after SIGTERM";
    api_request_events_for_reads: bool = "API_REQUEST_EVENTS_FOR_READS", "false", "whether request events are also recorded for read-only calls";
    api_advertised_host: String = "API_ADVERTISED_HOST", "localhost", "host name in the OpenAPI document";
    api_advertised_base_path: String = "API_ADVERTISED_BASE_PATH", "/", "base path in the OpenAPI document";
    api_advertised_http_schemes: String = "API_ADVERTISED_HTTP_SCHEMES", "http", "schemes in the OpenAPI document, separated by spaces";
    federation_max_token_bytes: u64 = "FEDERATION_MAX_TOKEN_BYTES", "16384", "maximum size of a token exchange request in bytes";
    federation_jwks_cache_seconds: u64 = "FEDERATION_JWKS_CACHE_SECONDS", "300", "seconds that issuer keys are cached";
    federation_jwks_fetch_timeout_seconds: u64 = "FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "5", "timeout for fetching issuer keys, in seconds";
    federation_jwks_ca_bundle: String = "FEDERATION_JWKS_CA_BUNDLE", "", "PEM file with additional trusted certificate authorities, or certificates of issuers' servers";
    federation_jwks_allowed_networks: String = "FEDERATION_JWKS_ALLOWED_NETWORKS", "", "private and loopback networks that redirects of issuers may lead to, such as 10.1.0.0/16, and link-local networks that keys may be fetched from";
    federation_rate_limit_per_minute: i64 = "FEDERATION_RATE_LIMIT_PER_MINUTE", "60", "maximum number of exchange attempts per source address and minute; 0: unlimited";
    namespace_key_reap_grace: i64 = "NAMESPACE_KEY_REAP_GRACE", "3600", "seconds after which an expired key is soft-deleted; 0: never";
    key_sweep_interval: u64 = "KEY_SWEEP_INTERVAL", "900", "seconds between sweeps for expired keys";
    quota_networks: u64 = "QUOTA_NETWORKS", "0", "default maximum number of networks of a namespace; 0: unlimited, as for all quotas";
    quota_floating_addresses: NumberOrPercent = "QUOTA_FLOATING_ADDRESSES", "50%", "default maximum number of addresses of the floating network that a namespace has, including those of networks with NAT and routed ones; a number, or a percentage of the floating network";
    quota_routed_addresses: u64 = "QUOTA_ROUTED_ADDRESSES", "0", "default maximum number of addresses that are routed to the networks of a namespace";
    quota_instances: u64 = "QUOTA_INSTANCES", "0", "default maximum number of instances of a namespace";
    quota_cpus: u64 = "QUOTA_CPUS", "0", "default maximum number of virtual CPUs of the instances of a namespace";
    quota_memory_mb: u64 = "QUOTA_MEMORY_MB", "0", "default maximum memory of the instances of a namespace, in MB";
    quota_disk_gb: u64 = "QUOTA_DISK_GB", "0", "default maximum disk space of the instances of a namespace, in GB";
    quota_keys: u64 = "QUOTA_KEYS", "1000", "default maximum number of keys of a namespace";
    quota_uploads: u64 = "QUOTA_UPLOADS", "1000", "default maximum number of unfinished uploads of a namespace";
    quota_upload_bytes: u64 = "QUOTA_UPLOAD_BYTES", "0", "default maximum size of the unfinished uploads of a namespace, in bytes";
    quota_artifact_bytes: u64 = "QUOTA_ARTIFACT_BYTES", "0", "default maximum size of all versions of the artifacts of a namespace, in bytes";
    quota_webhooks: u64 = "QUOTA_WEBHOOKS", "10", "default maximum number of webhooks of a namespace";
    webhook_allowed_networks: String = "WEBHOOK_ALLOWED_NETWORKS", "", "private, loopback and link-local networks that webhooks may send to, such as 10.1.0.0/16";
    cleaner_delay: u64 = "CLEANER_DELAY", "3600", "seconds until soft-deleted objects and finished operations are removed";
    cluster_op_stuck_threshold: u64 = "CLUSTER_OP_STUCK_THRESHOLD", "1800", "timeout of one attempt of an operation, in seconds";
    cluster_op_max_attempts: u64 = "CLUSTER_OP_MAX_ATTEMPTS", "5", "maximum number of attempts of an operation";
    cluster_op_lease: u64 = "CLUSTER_OP_LEASE", "15", "seconds after which the lease of an operation expires without renewal";
    agent_operation_default_deadline: u64 = "AGENT_OPERATION_DEFAULT_DEADLINE", "600", "default deadline of an agent operation, in seconds";
    agent_operation_default_progress_timeout: u64 = "AGENT_OPERATION_DEFAULT_PROGRESS_TIMEOUT", "30", "default progress timeout of an agent operation, in seconds";
    agent_operation_max_deadline: u64 = "AGENT_OPERATION_MAX_DEADLINE", "86400", "maximum deadline and progress timeout of an agent operation, in seconds";
    agent_program: String = "AGENT_PROGRAM", "", "path of the agent that guests download, a static executable; empty: muster-agent next to this executable";
    kerbside_url: String = "KERBSIDE_URL", "", "URL of the console proxy; empty: disabled";
    kerbside_signing_key: String = "KERBSIDE_SIGNING_KEY", "auto", "key that signs console tokens: auto (derived from AUTH_SECRET_SEED) or the path of an Ed25519 key in PEM; empty: none";
    kerbside_token_duration: u64 = "KERBSIDE_TOKEN_DURATION", "300", "lifetime of console tokens in seconds";
    max_audit_event_age: u64 = "MAX_AUDIT_EVENT_AGE", "7776000", "retention of audit events in seconds";
    max_mutate_event_age: u64 = "MAX_MUTATE_EVENT_AGE", "7776000", "retention of mutate events in seconds";
    max_status_event_age: u64 = "MAX_STATUS_EVENT_AGE", "604800", "retention of status events in seconds";
    max_usage_event_age: u64 = "MAX_USAGE_EVENT_AGE", "2592000", "retention of usage events in seconds";
    max_resources_event_age: u64 = "MAX_RESOURCES_EVENT_AGE", "604800", "retention of resources events in seconds";
    max_prune_event_age: u64 = "MAX_PRUNE_EVENT_AGE", "2592000", "retention of prune events in seconds";
    max_historic_event_age: u64 = "MAX_HISTORIC_EVENT_AGE", "7776000", "retention of historic events in seconds; they date from releases whose events had no type, which Muster never had, so it records none";
    max_health_event_age: u64 = "MAX_HEALTH_EVENT_AGE", "7776000", "retention of health events in seconds";
    max_api_request_event_age: u64 = "MAX_API_REQUEST_EVENT_AGE", "86400", "retention of the events of API requests in seconds";
    event_prune_interval: u64 = "EVENT_PRUNE_INTERVAL", "86400", "seconds between prunes of expired events";
    event_prune_budget: u64 = "EVENT_PRUNE_BUDGET", "1500", "maximum duration of a prune in seconds";
    event_store_max_mb: u64 = "EVENT_STORE_MAX_MB", "4096", "approximate maximum size of all events in MiB; above it the oldest are removed, those of API requests first; 0: unlimited";
    drain_batch_size: u64 = "DRAIN_BATCH_SIZE", "100", "maximum number of events written to the database in one transaction";
    drain_poll_interval: f64 = "DRAIN_POLL_INTERVAL", "0.1", "seconds between polls of the local event spool";
    spool_high_water_mark: u64 = "SPOOL_HIGH_WATER_MARK", "100000", "maximum number of events in the local spool; further ones are dropped and counted";
    usage_event_frequency: u64 = "USAGE_EVENT_FREQUENCY", "60", "seconds between usage events of an object and between resources events of a node";
    node_checkin_interval: f64 = "NODE_CHECKIN_INTERVAL", "3", "seconds between check-ins of a node";
    node_checkin_maximum: u64 = "NODE_CHECKIN_MAXIMUM", "15", "seconds without check-in after which a node counts as missing; at least twice NODE_CHECKIN_INTERVAL";
    node_port: u16 = "NODE_PORT", "13002", "port for other nodes of a cluster with MariaDB, on the address of the API; 0: a free one";
    node_response_timeout: f64 = "NODE_RESPONSE_TIMEOUT", "10", "seconds that another node may take to respond to a forwarded request; one that is alive and still working on it may take longer";
    fencing: FencingPolicy = "FENCING", "none", "whether the VMs of a node that cannot reach the database keep running (none) or are stopped (self), unless their instance says otherwise; the same on every node";
    fencing_lease: u64 = "FENCING_LEASE", "30", "seconds after its last check-in when a node stops its VMs with self-fencing; at least three times NODE_CHECKIN_INTERVAL, the same on every node";
    node_name: String = "NODE_NAME", "", "name of this node; empty: the host name";
    node_uuid: String = "NODE_UUID", "", "UUID of this node; empty: generated at the first start";
    node_is_hypervisor: bool = "NODE_IS_HYPERVISOR", "true", "whether this node runs instances";
    node_is_network_node: bool = "NODE_IS_NETWORK_NODE", "true", "whether this node may become the network node";
    node_is_database_node: bool = "NODE_IS_DATABASE_NODE", "true", "whether this node serves the database";
    node_mesh_ip: Option<Ipv4Addr> = "NODE_MESH_IP", "", "address of this node in the mesh of nodes";
    network_node_ip: Option<Ipv4Addr> = "NETWORK_NODE_IP", "", "mesh address of the only node that may be the network node; empty: any node with NODE_IS_NETWORK_NODE";
    network_node_lease: f64 = "NETWORK_NODE_LEASE", "12", "seconds after which another node replaces a network node that stopped renewing its lease";
    network_virtual_ip: Option<InterfaceAddress> = "NETWORK_VIRTUAL_IP", "", "address with prefix length that the active network node has on NODE_EGRESS_NIC, as the target of external routes";
    node_egress_nic: String = "NODE_EGRESS_NIC", "eth0", "interface of the external network";
    node_mesh_nic: String = "NODE_MESH_NIC", "eth0", "interface of the mesh of nodes";
    storage_path: String = "STORAGE_PATH", "", "directory of images and disks; empty: the data directory";
    shared_storage: String = "SHARED_STORAGE", "", "path at which this host has mounted storage that it shares with others, such as NFS, for the disks of instances with storage: shared; empty: none";
    replica_interval: u64 = "REPLICA_INTERVAL", "60", "seconds between copies of the disks of an instance with replicas; after a copy that takes longer, the next one follows immediately";
    floating_network: String = "FLOATING_NETWORK", "192.168.20.0/24", "netblock of the floating addresses";
    network_check_senders: bool = "NETWORK_CHECK_SENDERS", "true", "whether frames of guests with spoofed sender addresses are dropped";
    network_masquerade: bool = "NETWORK_MASQUERADE", "true", "whether the network node masquerades the floating network with its own address";
    dns_server: Ipv4Addr = "DNS_SERVER", "8.8.8.8", "DNS resolver of guests";
    max_hypervisor_mtu: u64 = "MAX_HYPERVISOR_MTU", "8000", "maximum MTU between nodes";
    ip_deletion_halo_duration: u64 = "IP_DELETION_HALO_DURATION", "300", "seconds that a released address is quarantined";
    cpu_overcommit_ratio: f64 = "CPU_OVERCOMMIT_RATIO", "3.0", "overcommit ratio of CPUs";
    ram_overcommit_ratio: f64 = "RAM_OVERCOMMIT_RATIO", "3.0", "overcommit ratio of memory";
    scheduler_cache_timeout: u64 = "SCHEDULER_CACHE_TIMEOUT", "5", "seconds that the scheduler caches the state of nodes";
    scheduler_target_load: f64 = "SCHEDULER_TARGET_LOAD", "0.75", "target load of a node per CPU";
    scheduler_demand_per_vcpu: f64 = "SCHEDULER_DEMAND_PER_VCPU", "0.6", "expected load of a new virtual CPU";
    scheduler_demand_decay_seconds: u64 = "SCHEDULER_DEMAND_DECAY_SECONDS", "600", "seconds in which the expected load of new virtual CPUs decays";
    scheduler_disk_overcommit: f64 = "SCHEDULER_DISK_OVERCOMMIT", "5.0", "overcommit ratio of disk space";
    backup_interval: u64 = "BACKUP_INTERVAL", "0", "seconds between backups of the database and the seed to BACKUP_DIRECTORY; 0: none";
    backup_directory: String = "BACKUP_DIRECTORY", "", "directory for periodic backups, on every node, best on storage that the hosts share";
    backup_recipient: Option<BackupRecipient> = "BACKUP_RECIPIENT", "", "recipient that backups are encrypted for, of `muster backup create-key`";
    backup_keep: u64 = "BACKUP_KEEP", "7", "number of periodic backups that are kept in BACKUP_DIRECTORY";
    rebalance_interval: u64 = "REBALANCE_INTERVAL", "0", "seconds between rebalancings, which migrate instances from full nodes to empty ones; 0: only by request";
    node_ram_reservation_gb: f64 = "NODE_RAM_RESERVATION_GB", "2.0", "memory reserved for the host, in gigabytes";
    node_cpu_reservation_threads: u64 = "NODE_CPU_RESERVATION_THREADS", "2", "CPU threads reserved for the host";
    node_disk_reservation_gb: f64 = "NODE_DISK_RESERVATION_GB", "20.0", "disk space reserved for the host, in gigabytes";
    artifact_max_versions_default: u64 = "ARTIFACT_MAX_VERSIONS_DEFAULT", "3", "default maximum number of versions of an artifact";
    blob_replication_factor: u64 = "BLOB_REPLICATION_FACTOR", "2", "number of replicas of a blob";
    checksum_verification_frequency: u64 = "CHECKSUM_VERIFICATION_FREQUENCY", "86400", "seconds between verifications of a blob";
    blob_transcode_maximum_idle_time: u64 = "BLOB_TRANSCODE_MAXIMUM_IDLE_TIME", "86400", "seconds that an unused conversion is kept";
    max_image_transfer_seconds: u64 = "MAX_IMAGE_TRANSFER_SECONDS", "1800", "timeout for fetching an image, in seconds";
    blob_deletion_delay: u64 = "BLOB_DELETION_DELAY", "3600", "seconds that an unreferenced blob is kept";
    upload_maximum_idle_time: u64 = "UPLOAD_MAXIMUM_IDLE_TIME", "86400", "seconds after which an idle upload is removed";
    max_image_size_gb: f64 = "MAX_IMAGE_SIZE_GB", "256", "maximum size of uploaded or fetched content, compressed and decompressed, in gigabytes";
    max_image_virtual_size_gb: f64 = "MAX_IMAGE_VIRTUAL_SIZE_GB", "4096", "maximum virtual size of an image in gigabytes";
    image_stall_timeout: u64 = "IMAGE_STALL_TIMEOUT", "30", "seconds without data after which a fetch is resumed with a new connection";
    image_fetch_allowed_networks: String = "IMAGE_FETCH_ALLOWED_NETWORKS", "", "private, loopback and link-local networks that images may be fetched from, such as 10.1.0.0/16";
    image_names: String = "IMAGE_NAMES", "", "image names that take precedence over the built-in ones: NAME=URL, separated by spaces; a NAME may end in *, a URL may contain {name} and {version}";
    image_user: String = "IMAGE_USER", "nobody", "user that runs the inspection and conversion of images";
    compress_snapshots: bool = "COMPRESS_SNAPSHOTS", "true", "whether snapshots are compressed";
    snapshots_default_to_thin: bool = "SNAPSHOTS_DEFAULT_TO_THIN", "false", "whether snapshots are thin by default";
    console_ports: bool = "CONSOLE_PORTS", "true", "whether the TCP ports of serial consoles and displays are open; the same on all nodes";
    archive_instance_console_duration: u64 = "ARCHIVE_INSTANCE_CONSOLE_DURATION", "0", "days that the console log of a deleted VM is kept in console-archive/ of STORAGE_PATH; 0: not archived";
    image_download_url: String = "IMAGE_DOWNLOAD_URL", "https://images.shakenfist.com", "base URL of named images";
    disk_bus: DiskBus = "DISK_BUS", "virtio", "default bus of disks: virtio, scsi, sata, usb or nvme";
    http_proxy_server: String = "HTTP_PROXY_SERVER", "", "proxy for fetching images and the keys of issuers";
    resources_metrics_port: u16 = "RESOURCES_METRICS_PORT", "13001", "port of the metrics of this daemon's nodes; 0: disabled";
    cluster_metrics_port: u16 = "CLUSTER_METRICS_PORT", "13007", "port of the metrics of the whole cluster; 0: disabled";
    mariadb_gateway_metrics_port: u16 = "MARIADB_GATEWAY_METRICS_PORT", "13006", "port of the metrics of events and their store; 0: disabled";
    metrics_token: Secret = "METRICS_TOKEN", "", "bearer token that all metrics ports require; empty: none";
    mariadb_host: String = "MARIADB_HOST", "", "MariaDB server to use if DATABASE_URL is empty, or several separated by commas";
    mariadb_port: u16 = "MARIADB_PORT", "3306", "port of MARIADB_HOST";
    mariadb_user: String = "MARIADB_USER", "shakenfist", "user at MARIADB_HOST";
    mariadb_password: Secret = "MARIADB_PASSWORD", "", "password at MARIADB_HOST";
    mariadb_database: String = "MARIADB_DATABASE", "shakenfist", "database at MARIADB_HOST";
    loki_base_url: String = "LOKI_BASE_URL", "", "URL of the Loki server that events are sent to, such as http://loki:3100; empty: disabled";
    loki_tenant: String = "LOKI_TENANT", "", "tenant at the Loki server; empty: none";
    loki_auth_header: Secret = "LOKI_AUTH_HEADER", "", "value of the Authorization header for the Loki server; empty: none";
    log_events_to_loki: bool = "LOG_EVENTS_TO_LOKI", "true", "whether events are sent to LOKI_BASE_URL";
    traces_endpoint: String = "TRACES_ENDPOINT", "", "URL of the OpenTelemetry collector that traces are sent to with OTLP over HTTP, such as http://collector:4318; empty: disabled";
    traces_sample_ratio: f64 = "TRACES_SAMPLE_RATIO", "1", "part of the traces that are sampled, from 0 to 1, of requests without the header traceparent";
    traces_auth_header: Secret = "TRACES_AUTH_HEADER", "", "value of the Authorization header for the collector of traces; empty: none";
    loglevel_api: LogLevel = "LOGLEVEL_API", "info", "log level of the API";
    loglevel_cleaner: LogLevel = "LOGLEVEL_CLEANER", "info", "log level of the removal of deleted objects and of expired events";
    loglevel_cluster: LogLevel = "LOGLEVEL_CLUSTER", "info", "log level of the cluster maintainer";
    loglevel_database: LogLevel = "LOGLEVEL_DATABASE", "info", "log level of the store";
    loglevel_main: LogLevel = "LOGLEVEL_MAIN", "info", "log level of everything else";
    loglevel_net: LogLevel = "LOGLEVEL_NET", "info", "log level of networks";
    loglevel_nodelock: LogLevel = "LOGLEVEL_NODELOCK", "info", "log level of the maintainer lease";
    loglevel_privexec: LogLevel = "LOGLEVEL_PRIVEXEC", "info", "log level of programs that the daemon runs";
    loglevel_queues: LogLevel = "LOGLEVEL_QUEUES", "info", "log level of operations";
    loglevel_resources: LogLevel = "LOGLEVEL_RESOURCES", "info", "log level of check-ins and usage reports";
    loglevel_sidechannel: LogLevel = "LOGLEVEL_SIDECHANNEL", "info", "log level of guest agents";
    loglevel_transfers: LogLevel = "LOGLEVEL_TRANSFERS", "info", "log level of downloads, uploads and copies of images";
}

impl Settings {
    /// Returns the default settings.
    #[must_use]
    pub fn defaults() -> Self {
        Self::new(&BTreeMap::new(), &BTreeMap::new()).expect("the defaults are valid")
    }

    /// Creates settings from names and values, as if from the environment.
    pub fn from_pairs(pairs: &[(&str, &str)]) -> Result<Self, String> {
        let environment =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self::new(&BTreeMap::new(), &environment)
    }

    /// Derives `DATABASE_URL` from the settings of the MariaDB, if only those are set.
    fn complete_database_url(&mut self) {
        if !self.database_url.expose().is_empty() || self.mariadb_host.is_empty() {
            return;
        }
        let [user, password, database] =
            [&*self.mariadb_user, self.mariadb_password.expose(), &*self.mariadb_database]
                .map(|text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string());
        let hosts = self.mariadb_host.split(',').map(|host| format!("{}:{}", host.trim(), self.mariadb_port));
        let hosts = hosts.collect::<Vec<_>>().join(",");
        self.database_url = Secret::new(format!("mysql://{user}:{password}@{hosts}/{database}"));
    }
}

/// Masks the value of a setting if it is a secret.
fn masked(name: &str, raw: &str) -> String {
    let words = ["SECRET", "PASSWORD", "PASSPHRASE", "TOKEN", "AUTH_HEADER"];
    let secret =
        words.iter().any(|word| name.contains(word)) || name.ends_with("_SEED") || name.ends_with("_KEY");
    // TLS_PRIVATE_KEY is the path of a key.
    let exempt = raw.is_empty() || raw.parse::<f64>().is_ok() || name == "TLS_PRIVATE_KEY";
    if secret && !exempt {
        return "********".into();
    }
    if name.ends_with("_URL") || name == "HTTP_PROXY_SERVER" { mask_password(raw) } else { raw.to_owned() }
}

/// Masks the password of a URL, and everything else that could be one.
#[must_use]
pub fn mask_password(url: &str) -> String {
    if url.starts_with("sqlite:") || url.is_empty() {
        return url.to_owned();
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // Possibly a malformed URL with a password.
        return url
            .split_once(':')
            .map_or_else(|| url.to_owned(), |(scheme, _)| format!("{scheme}:********"));
    };
    let (rest, query) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?********"));
    match rest.rsplit_once('@') {
        Some((login, location)) => {
            let user = login.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}:********@{location}{query}")
        }
        None => format!("{scheme}://{rest}{query}"),
    }
}

/// Parses a config file of `NAME = value` lines, with bare or quoted values and `#` comments. Unknown names are errors.
pub fn parse_file(text: &str) -> Result<BTreeMap<String, (usize, String)>, String> {
    let mut values = BTreeMap::new();
    for (number, line) in text.lines().enumerate().map(|(at, line)| (at + 1, line.trim())) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) =
            line.split_once('=').ok_or_else(|| format!("line {number}: expected NAME = value"))?;
        let name = name.trim();
        if !Settings::NAMES.contains(&name) {
            return Err(format!("line {number}: unknown setting {name:?}"));
        }
        let value = unquote(value.trim()).map_err(|why| format!("line {number}: {name}: {why}"))?;
        if values.insert(name.to_owned(), (number, value)).is_some() {
            return Err(format!("line {number}: {name} is set twice"));
        }
    }
    Ok(values)
}

fn unquote(value: &str) -> Result<String, &'static str> {
    let Some(quote) = value.chars().next().filter(|c| matches!(c, '"' | '\'')) else {
        return Ok(value.split(" #").next().unwrap_or_default().trim_end().to_owned());
    };
    let (inside, after) = value[1..].split_once(quote).ok_or("the quote is not closed")?;
    let after = after.trim();
    if !after.is_empty() && !after.starts_with('#') {
        return Err("text after the closing quote");
    }
    Ok(inside.to_owned())
}
