//! Logging to standard error, as text or JSON.

use std::io::IsTerminal as _;

use muster_types::settings::{LogFormat, Settings};
use tracing_subscriber::EnvFilter;

/// Returns the filter directives: the level of each part of the program.
fn filter_directives(settings: &Settings) -> String {
    let parts = [
        ("", &settings.loglevel_main),
        ("muster_api=", &settings.loglevel_api),
        ("muster_control::auth=", &settings.loglevel_api),
        ("muster_control::reconcile::cleaner=", &settings.loglevel_cleaner),
        ("muster_control::reconcile=", &settings.loglevel_cluster),
        ("muster_store=", &settings.loglevel_database),
        ("muster_store::leases=", &settings.loglevel_nodelock),
        ("muster_control::operations=", &settings.loglevel_queues),
        ("muster_control::reconcile::checkin=", &settings.loglevel_resources),
        ("muster_node::network=", &settings.loglevel_net),
        ("muster_node::host=", &settings.loglevel_privexec),
        ("muster_node::guest=", &settings.loglevel_sidechannel),
        ("muster_node::blob=", &settings.loglevel_transfers),
    ];
    parts.map(|(target, level)| format!("{target}{level}")).join(",")
}

/// Initializes logging.
pub(crate) fn init(settings: &Settings) {
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter_directives(settings)))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    match settings.log_format {
        LogFormat::Text => log.with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}
