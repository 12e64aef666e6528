use super::*;

#[test]
fn environment_overrides_file_and_file_overrides_default() {
    let file = parse_file("# mine\nCLEANER_DELAY = 7 # soon\nZONE=\"here\"\n").unwrap();
    let environment = BTreeMap::from([("CLEANER_DELAY".to_owned(), "5".to_owned())]);
    let settings = Settings::new(&file, &environment).unwrap();
    assert_eq!((settings.cleaner_delay, settings.zone.as_str()), (5, "here"));
    let source = |name| settings.effective.iter().find(|e| e.name == name).unwrap().source.clone();
    assert_eq!(source("CLEANER_DELAY"), SettingSource::Environment);
    assert_eq!(source("ZONE"), SettingSource::File { line: 3 });
    assert_eq!(source("API_DRAIN_GRACE"), SettingSource::Default);
}

#[test]
fn errors_of_the_file_name_the_line() {
    assert_eq!(parse_file("\nCLEANER_DELY=5").unwrap_err(), "line 2: unknown setting \"CLEANER_DELY\"");
    assert_eq!(parse_file("CLEANER_DELAY 5").unwrap_err(), "line 1: expected NAME = value");
    for removed in ["CLUSTER_OPERATION_TARGET_RETENTION", "NODE_EGRESS_IP", "MARIADB_GATEWAY_PORT"] {
        assert!(parse_file(&format!("{removed} = 1")).unwrap_err().contains("unknown setting"), "{removed}");
    }
    assert!(parse_file("ZONE=\"x").unwrap_err().contains("not closed"));
}

#[test]
fn errors_of_values_name_the_setting() {
    for (name, value) in [
        ("CLEANER_DELAY", "soon"),
        ("API_VALIDATION_MODE", "maybe"),
        ("DRAIN_BATCH_SIZE", "0"),
        ("AUTH_SECRET_SEED", "short"),
        ("SYSTEM_KEY", "sfk_lookalike"),
        ("LOGLEVEL_API", "loud"),
        ("DISK_BUS", "ide"),
        ("LOKI_BASE_URL", "loki:3100"),
        ("LOKI_AUTH_HEADER", "Bearer \n"),
        ("TRACES_ENDPOINT", "collector:4318"),
        ("TRACES_SAMPLE_RATIO", "1.5"),
        ("TRACES_AUTH_HEADER", "Bearer \n"),
        ("TLS_CERTIFICATE", "/tmp/cert.pem"),
        ("NODE_NAME", "7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11"),
        ("NODE_NAME", "a/b"),
        ("NODE_MESH_IP", "fd00::1"),
        ("NETWORK_NODE_IP", "host-1"),
        ("NETWORK_NODE_LEASE", "0.5"),
        ("NETWORK_VIRTUAL_IP", "198.51.100.9"),
        ("NETWORK_VIRTUAL_IP", "198.51.100.0/24"),
        ("NETWORK_VIRTUAL_IP", "198.51.100.255/24"),
        ("NETWORK_VIRTUAL_IP", "127.0.0.9/8"),
        ("NETWORK_VIRTUAL_IP", "192.168.20.9/24"),
        ("DNS_SERVER", "8.8.8.8\nuser=root"),
    ] {
        let why = Settings::from_pairs(&[(name, value)]).unwrap_err();
        assert!(why.contains(name), "{why}");
    }
}

#[test]
fn rejects_limits_that_nodes_exceed_between_check_ins() {
    for (interval, name, value) in [
        ("3", "NODE_CHECKIN_MAXIMUM", "2"),
        ("20", "NODE_CHECKIN_MAXIMUM", "15"),
        ("3", "FENCING_LEASE", "0"),
        ("3", "FENCING_LEASE", "1"),
        ("3", "FENCING_LEASE", "8"),
    ] {
        let why = Settings::from_pairs(&[("NODE_CHECKIN_INTERVAL", interval), (name, value)]).unwrap_err();
        assert!(why.starts_with(name) && why.contains("NODE_CHECKIN_INTERVAL"), "{why}");
    }
    for (interval, maximum, lease) in [("3", "6", "9"), ("1", "4", "4"), ("0.2", "2", "1")] {
        let settings = [
            ("NODE_CHECKIN_INTERVAL", interval),
            ("NODE_CHECKIN_MAXIMUM", maximum),
            ("FENCING_LEASE", lease),
        ];
        Settings::from_pairs(&settings).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn rejects_numbers_that_would_overflow_timers() {
    for name in ["API_MAX_CONNECTIONS", "API_TIMEOUT", "EVENT_PRUNE_BUDGET", "CLEANER_DELAY"] {
        assert!(Settings::from_pairs(&[(name, "18446744073709551615")]).unwrap_err().contains(name));
    }
    assert!(Settings::from_pairs(&[("EVENT_PRUNE_BUDGET", "0")]).is_err());
}

#[test]
fn masks_passwords_of_urls() {
    for (url, shown) in [
        ("mysql://me:pw@host/db", "mysql://me:********@host/db"),
        ("mysql://me:p@w@host/db", "mysql://me:********@host/db"),
        ("mysql://me:pw@a:3306,b,c:3307/db", "mysql://me:********@a:3306,b,c:3307/db"),
        ("mysql://host/db?password=pw", "mysql://host/db?********"),
        ("mysql:me:pw@host", "mysql:********"),
        ("sqlite:/var/lib/muster.db", "sqlite:/var/lib/muster.db"),
        ("https://images.example/x", "https://images.example/x"),
    ] {
        assert_eq!(mask_password(url), shown);
    }
}

#[test]
fn database_url_is_derived_from_the_settings_of_the_mariadb() {
    let mariadb = [
        ("MARIADB_HOST", "db1, db2"),
        ("MARIADB_PORT", "3307"),
        ("MARIADB_USER", "me"),
        ("MARIADB_PASSWORD", "p@ss"),
        ("MARIADB_DATABASE", "cloud"),
    ];
    let url = |pairs: &[_]| Settings::from_pairs(pairs).unwrap().database_url.expose().to_owned();
    assert_eq!(url(&mariadb), "mysql://me:p%40ss@db1:3307,db2:3307/cloud");
    assert_eq!(url(&mariadb[1..]), "");
    assert_eq!(url(&[mariadb[0], ("DATABASE_URL", "sqlite:/x")]), "sqlite:/x");
}

#[test]
fn debug_output_masks_secrets() {
    let settings = Settings::from_pairs(&[
        ("SYSTEM_KEY", "hunter2"),
        ("DATABASE_URL", "mysql://me:pa@ss@db/muster"),
        ("MARIADB_PASSWORD", "hunter2"),
    ])
    .unwrap();
    let shown = format!("{settings:?}");
    assert!(!shown.contains("hunter2") && !shown.contains("pa@ss"), "{shown}");
    assert!(shown.contains("mysql://me:********@db/muster"));
}

/// Returns the names and values that `muster.conf.example` shows.
fn example() -> Vec<(String, String)> {
    let text = include_str!("../../../packaging/muster.conf.example");
    let lines = text.lines().filter_map(|line| line.strip_prefix('#')?.split_once('='));
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    lines
        .map(|(name, value)| (name.trim_end().to_owned(), value.trim().to_owned()))
        .filter(|(name, _)| is_name(name))
        .collect()
}

#[test]
fn example_file_shows_the_defaults() {
    let defaults = Settings::defaults();
    let shown = example();
    assert!(shown.len() > 50, "{shown:?}");
    for (name, value) in shown {
        let setting = defaults.effective.iter().find(|setting| setting.name == name);
        let default = &setting.unwrap_or_else(|| panic!("{name} is not a setting")).value;
        // A setting without a default is shown with an example.
        assert!(default.is_empty() || *default == value, "{name}: the default is {default:?}, not {value:?}");
        Settings::from_pairs(&[(&name, &value)]).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn rejects_shared_storage_that_is_not_another_absolute_path() {
    let new = |shared: &str| Settings::from_pairs(&[("STORAGE_PATH", "/srv"), ("SHARED_STORAGE", shared)]);
    assert!(new("mnt/nfs").unwrap_err().contains("must be an absolute path"));
    assert!(new("/srv").unwrap_err().contains("must not be STORAGE_PATH"));
    assert_eq!(new("/mnt/nfs").unwrap().shared_storage, "/mnt/nfs");
}
