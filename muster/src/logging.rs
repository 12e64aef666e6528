//! Logging to standard error, as text or JSON.

use std::io::IsTerminal as _;

use muster_types::settings::{LogFormat, LogLevel, Settings};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

const fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

/// Returns the level of each part of the program.
fn targets(settings: &Settings) -> Targets {
    let parts = [
        ("muster_api", settings.loglevel_api),
        ("muster_control::auth", settings.loglevel_api),
        ("muster_control::reconcile::cleaner", settings.loglevel_cleaner),
        ("muster_control::reconcile", settings.loglevel_cluster),
        ("muster_store", settings.loglevel_database),
        ("muster_store::leases", settings.loglevel_nodelock),
        ("muster_control::operations", settings.loglevel_queues),
        ("muster_control::reconcile::checkin", settings.loglevel_resources),
        ("muster_node::network", settings.loglevel_net),
        ("muster_node::host", settings.loglevel_privexec),
        ("muster_node::guest", settings.loglevel_sidechannel),
        ("muster_node::blob", settings.loglevel_transfers),
    ];
    Targets::new()
        .with_default(filter(settings.loglevel_main))
        .with_targets(parts.map(|(target, level)| (target, filter(level))))
}

/// Initializes logging.
pub(crate) fn init(settings: &Settings) {
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    let registry = tracing_subscriber::registry().with(targets(settings));
    match settings.log_format {
        LogFormat::Text => registry.with(log.with_target(false)).init(),
        LogFormat::Json => registry.with(log.json().flatten_event(true)).init(),
    }
}
