//! Checks of values that depend on more than their type.

use std::path::Path;

use super::*;

/// The least value of `NODE_CHECKIN_MAXIMUM`, in check-in intervals: one check-in may fail.
const MIN_CHECKIN_MAXIMUM: u32 = 2;
/// The least value of `FENCING_LEASE`, in check-in intervals: two check-ins may fail before VMs are stopped.
const MIN_FENCING_LEASE: u32 = 3;

impl Settings {
    /// Validates values that depend on more than their type.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_positive()?;
        self.check_maxima()?;
        self.check_ranges()?;
        self.check_check_ins()?;
        self.check_addresses()?;
        self.check_names()?;
        self.check_storage()?;
        self.check_loki()?;
        self.check_traces()?;
        self.check_backups()?;
        self.check_secrets()
    }

    fn check_backups(&self) -> Result<(), String> {
        if self.backup_interval == 0 {
            return Ok(());
        }
        if !Path::new(&self.backup_directory).is_absolute() {
            return Err("BACKUP_DIRECTORY: must be an absolute path if BACKUP_INTERVAL is set".into());
        }
        if self.backup_recipient.is_none() {
            return Err("BACKUP_RECIPIENT: must be set if BACKUP_INTERVAL is, because backups are encrypted. `muster backup \
                        create-key FILE` creates a key and prints its recipient"
                .into());
        }
        Ok(())
    }

    fn check_positive(&self) -> Result<(), String> {
        let positive = [
            ("API_TOKEN_DURATION", self.api_token_duration),
            ("API_MAX_REQUEST_BODY_BYTES", self.api_max_request_body_bytes),
            ("API_MAX_BODY_MEMORY_MB", self.api_max_body_memory_mb),
            ("API_MAX_CONNECTIONS", self.api_max_connections),
            ("API_TIMEOUT", self.api_timeout),
            ("CLUSTER_OP_MAX_ATTEMPTS", self.cluster_op_max_attempts),
            ("CLUSTER_OP_STUCK_THRESHOLD", self.cluster_op_stuck_threshold),
            ("CLUSTER_OP_LEASE", self.cluster_op_lease),
            ("DRAIN_BATCH_SIZE", self.drain_batch_size),
            ("SPOOL_HIGH_WATER_MARK", self.spool_high_water_mark),
            ("NODE_CHECKIN_MAXIMUM", self.node_checkin_maximum),
            ("USAGE_EVENT_FREQUENCY", self.usage_event_frequency),
            ("KEY_SWEEP_INTERVAL", self.key_sweep_interval),
            ("EVENT_PRUNE_INTERVAL", self.event_prune_interval),
            ("EVENT_PRUNE_BUDGET", self.event_prune_budget),
            ("IMAGE_STALL_TIMEOUT", self.image_stall_timeout),
            ("MAX_IMAGE_TRANSFER_SECONDS", self.max_image_transfer_seconds),
            ("UPLOAD_MAXIMUM_IDLE_TIME", self.upload_maximum_idle_time),
            ("CHECKSUM_VERIFICATION_FREQUENCY", self.checksum_verification_frequency),
            ("ARTIFACT_MAX_VERSIONS_DEFAULT", self.artifact_max_versions_default),
            ("BLOB_REPLICATION_FACTOR", self.blob_replication_factor),
            ("REPLICA_INTERVAL", self.replica_interval),
            ("BACKUP_KEEP", self.backup_keep),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name}: must be at least 1"));
        }
        Ok(())
    }

    /// Rejects numbers with which timers or tables could overflow.
    fn check_maxima(&self) -> Result<(), String> {
        for setting in &self.effective {
            let limit: f64 = match setting.name {
                "API_MAX_CONNECTIONS" => 1e6,
                "API_MAX_BODY_MEMORY_MB" | "EVENT_STORE_MAX_MB" => 16_777_216.0,
                "API_MAX_REQUEST_BODY_BYTES" | "FEDERATION_MAX_TOKEN_BYTES" => 1_073_741_824.0,
                "SPOOL_HIGH_WATER_MARK" => 1e9,
                name if name.starts_with("QUOTA_") => 1e15,
                _ => 10.0 * 365.0 * 86400.0,
            };
            if setting.value.parse::<f64>().is_ok_and(|number| number.abs() > limit) {
                return Err(format!("{}: must be at most {limit}", setting.name));
            }
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), String> {
        for (name, value) in [
            ("MAX_IMAGE_SIZE_GB", self.max_image_size_gb),
            ("MAX_IMAGE_VIRTUAL_SIZE_GB", self.max_image_virtual_size_gb),
        ] {
            if !(0.001..=1_000_000.0).contains(&value) {
                return Err(format!("{name}: must be between 0.001 and 1000000"));
            }
        }
        if self.api_max_request_body_bytes.saturating_mul(2) > self.api_max_body_memory_mb << 20 {
            return Err("API_MAX_BODY_MEMORY_MB: must be at least twice API_MAX_REQUEST_BODY_BYTES".into());
        }
        if self.drain_batch_size > 3000 {
            return Err("DRAIN_BATCH_SIZE: must be at most 3000".into());
        }
        for (name, value) in [
            ("DRAIN_POLL_INTERVAL", self.drain_poll_interval),
            ("NODE_CHECKIN_INTERVAL", self.node_checkin_interval),
            ("NODE_RESPONSE_TIMEOUT", self.node_response_timeout),
        ] {
            if !(0.001..=86400.0).contains(&value) {
                return Err(format!("{name}: must be between 0.001 and 86400 seconds"));
            }
        }
        if !(1.0..=60.0).contains(&self.network_node_lease) {
            return Err("NETWORK_NODE_LEASE: must be between 1 and 60 seconds".into());
        }
        Ok(())
    }

    /// Rejects limits that a node would exceed between two check-ins, or after a single one that fails.
    fn check_check_ins(&self) -> Result<(), String> {
        let interval = self.node_checkin_interval;
        for (name, value, times) in [
            ("NODE_CHECKIN_MAXIMUM", self.node_checkin_maximum, MIN_CHECKIN_MAXIMUM),
            ("FENCING_LEASE", self.fencing_lease, MIN_FENCING_LEASE),
        ] {
            #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
            let seconds = value as f64;
            if seconds < f64::from(times) * interval {
                return Err(format!(
                    "{name}: must be at least {times} times NODE_CHECKIN_INTERVAL, which is {interval} seconds"
                ));
            }
        }
        Ok(())
    }

    fn check_addresses(&self) -> Result<(), String> {
        let floating = crate::address::Netblock::check(&self.floating_network);
        floating.map_err(|why| format!("FLOATING_NETWORK: {why}"))?;
        self.check_virtual_ip()?;
        for (name, networks) in [
            ("IMAGE_FETCH_ALLOWED_NETWORKS", &self.image_fetch_allowed_networks),
            ("FEDERATION_JWKS_ALLOWED_NETWORKS", &self.federation_jwks_allowed_networks),
            ("WEBHOOK_ALLOWED_NETWORKS", &self.webhook_allowed_networks),
        ] {
            if let Some(word) = networks.split([' ', ',']).find(|word| !word.is_empty() && !is_network(word))
            {
                return Err(format!("{name}: {word:?} is not a network"));
            }
        }
        Ok(())
    }

    fn check_virtual_ip(&self) -> Result<(), String> {
        let Some(virtual_ip) = self.network_virtual_ip else { return Ok(()) };
        let floating: crate::address::Netblock =
            self.floating_network.parse().map_err(|error| format!("FLOATING_NETWORK: {error}"))?;
        if floating.contains(virtual_ip.address) {
            return Err("NETWORK_VIRTUAL_IP: must not be in FLOATING_NETWORK, but in the network of \
                        NODE_EGRESS_NIC"
                .into());
        }
        if self.node_mesh_ip == Some(virtual_ip.address) || self.network_node_ip == Some(virtual_ip.address) {
            return Err(
                "NETWORK_VIRTUAL_IP: must not be the address of a node, because it moves between nodes"
                    .into(),
            );
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), String> {
        check_node_name(&self.node_name).map_err(|why| format!("NODE_NAME: {why}"))?;
        if !self.node_uuid.is_empty() && self.node_uuid.parse::<crate::ids::NodeId>().is_err() {
            return Err("NODE_UUID: is not a UUID".into());
        }
        for word in self.image_names.split_whitespace() {
            if word.split_once('=').is_none_or(|(name, url)| name.is_empty() || !url.contains("://")) {
                return Err(format!("IMAGE_NAMES: {word:?} is not NAME=URL"));
            }
        }
        Ok(())
    }

    fn check_storage(&self) -> Result<(), String> {
        let (own, shared) = (Path::new(&self.storage_path), Path::new(&self.shared_storage));
        if self.shared_storage.is_empty() {
            return Ok(());
        }
        if !shared.is_absolute() {
            return Err("SHARED_STORAGE: must be an absolute path".into());
        }
        if shared == own {
            return Err("SHARED_STORAGE: must not be STORAGE_PATH, which belongs to this host alone".into());
        }
        Ok(())
    }

    fn check_loki(&self) -> Result<(), String> {
        let url = &self.loki_base_url;
        if !url.is_empty() && !url.starts_with("http://") && !url.starts_with("https://") {
            return Err("LOKI_BASE_URL: must start with http:// or https://".into());
        }
        for (name, value) in
            [("LOKI_TENANT", self.loki_tenant.as_str()), ("LOKI_AUTH_HEADER", self.loki_auth_header.expose())]
        {
            if !value.chars().all(|c| matches!(c, ' '..='~')) {
                return Err(format!("{name}: must consist of printable ASCII characters"));
            }
        }
        Ok(())
    }

    fn check_traces(&self) -> Result<(), String> {
        let url = &self.traces_endpoint;
        if !url.is_empty() && !url.starts_with("http://") && !url.starts_with("https://") {
            return Err("TRACES_ENDPOINT: must start with http:// or https://".into());
        }
        if !(0.0..=1.0).contains(&self.traces_sample_ratio) {
            return Err("TRACES_SAMPLE_RATIO: must be between 0 and 1".into());
        }
        if !self.traces_auth_header.expose().chars().all(|c| matches!(c, ' '..='~')) {
            return Err("TRACES_AUTH_HEADER: must consist of printable ASCII characters".into());
        }
        Ok(())
    }

    fn check_secrets(&self) -> Result<(), String> {
        if self.tls_certificate.is_empty() != self.tls_private_key.is_empty() {
            return Err("TLS_CERTIFICATE and TLS_PRIVATE_KEY: set both or neither".into());
        }
        let seed = self.auth_secret_seed.expose();
        if seed == "~~unconfigured~~" || (!seed.is_empty() && seed.len() < 16) {
            return Err("AUTH_SECRET_SEED: must be at least 16 characters".into());
        }
        if self.system_key.expose().len() > MAX_SECRET_BYTES {
            return Err(format!("SYSTEM_KEY: must be at most {MAX_SECRET_BYTES} bytes"));
        }
        if self.system_key.has_prefix() && !self.system_key.is_generated() {
            return Err(
                "SYSTEM_KEY: starts with sfk_ but its checksum is wrong, so it could never log in".into()
            );
        }
        Ok(())
    }
}

/// Returns whether a text is a network or a single address.
fn is_network(word: &str) -> bool {
    let (address, bits) = word.split_once('/').unwrap_or((word, "0"));
    let max = match address.parse() {
        Ok(std::net::IpAddr::V4(_)) => 32,
        Ok(std::net::IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    bits.parse::<u8>().is_ok_and(|bits| bits <= max)
}

/// Checks the name of a node, which is part of URLs and must not look like an id.
fn check_node_name(name: &str) -> Result<(), &'static str> {
    if name.chars().count() > 255 {
        return Err("must be at most 255 characters");
    }
    if name.chars().any(|c| c.is_control() || c == '/') || name == "." || name == ".." {
        return Err("must not contain slashes or control characters, or be a dot segment");
    }
    if name.parse::<crate::ids::NodeId>().is_ok() {
        return Err("must not be a UUID");
    }
    Ok(())
}
