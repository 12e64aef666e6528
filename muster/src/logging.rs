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

/// Returns the level of each module that has its own setting; the others have LOGLEVEL_MAIN.
fn module_levels(settings: &Settings) -> [(&'static str, LogLevel); 21] {
    [
        ("muster_api", settings.loglevel_api),
        ("muster_control::auth", settings.loglevel_api),
        ("muster_control::reconcile::cleaner", settings.loglevel_cleaner),
        ("muster_control::reconcile::event_prune", settings.loglevel_cleaner),
        ("muster_control::reconcile", settings.loglevel_cluster),
        ("muster_store", settings.loglevel_database),
        ("muster_control::reconcile::maintainer", settings.loglevel_nodelock),
        ("muster_control::operations", settings.loglevel_queues),
        ("muster_control::reconcile::checkin", settings.loglevel_resources),
        ("muster_control::reconcile::network_usage", settings.loglevel_resources),
        ("muster_control::reconcile::vm_usage", settings.loglevel_resources),
        ("muster_node::network", settings.loglevel_net),
        ("muster_control::reconcile::networks", settings.loglevel_net),
        ("muster_node::command", settings.loglevel_privexec),
        ("muster_node::guest", settings.loglevel_sidechannel),
        ("muster_control::reconcile::agents", settings.loglevel_sidechannel),
        ("muster_control::reconcile::agent_operations", settings.loglevel_sidechannel),
        ("muster_node::storage", settings.loglevel_transfers),
        ("muster_control::fetch", settings.loglevel_transfers),
        ("muster_control::operations::fetch_artifact", settings.loglevel_transfers),
        ("muster_control::reconcile::blob_copies", settings.loglevel_transfers),
    ]
}

fn targets(settings: &Settings) -> Targets {
    let levels = module_levels(settings).map(|(module, level)| (module, filter(level)));
    Targets::new().with_default(filter(settings.loglevel_main)).with_targets(levels)
}

/// Initializes logging.
pub(crate) fn init(settings: &Settings) {
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // It would be reported on standard error, and panic if that is closed.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    let registry = tracing_subscriber::registry().with(targets(settings));
    match settings.log_format {
        LogFormat::Text => registry.with(log.with_target(false)).init(),
        LogFormat::Json => registry.with(log.json().flatten_event(true)).init(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    fn sources(path: &Path) -> Vec<PathBuf> {
        match fs::read_dir(path) {
            Err(_) => vec![path.to_owned()],
            Ok(entries) => entries.flat_map(|entry| sources(&entry.unwrap().path())).collect(),
        }
    }

    /// Returns the files of a module: its own and those of the modules in it.
    fn module_files(module: &str) -> Vec<PathBuf> {
        let (package, path) = module.split_once("::").unwrap_or((module, ""));
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let base =
            root.join(package.strip_prefix("muster_").unwrap()).join("src").join(path.replace("::", "/"));
        let candidates = [base.with_extension("rs"), base];
        candidates.iter().filter(|path| path.exists()).flat_map(|path| sources(path)).collect()
    }

    #[test]
    fn every_module_with_a_level_logs_something() {
        let macros = ["error!(", "warn!(", "info!(", "debug!(", "trace!("];
        for (module, _) in module_levels(&Settings::defaults()) {
            let logs = module_files(module).iter().any(|file| {
                let text = fs::read_to_string(file).unwrap();
                macros.iter().any(|name| text.contains(&format!("tracing::{name}")))
            });
            assert!(logs, "{module} does not exist or has no log lines");
        }
    }

    #[test]
    fn every_level_setting_applies_to_a_module() {
        let names = Settings::NAMES.iter().filter(|name| name.starts_with("LOGLEVEL_"));
        for name in names.filter(|name| **name != "LOGLEVEL_MAIN") {
            let settings = Settings::from_pairs(&[(name, "trace")]).unwrap();
            let changed = module_levels(&settings).iter().any(|(_, level)| *level == LogLevel::Trace);
            assert!(changed, "{name} has no effect");
        }
    }

    /// Settings that no code reads would be accepted without an effect.
    #[test]
    fn every_setting_is_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let packages = ["api", "control", "muster", "node", "store"];
        let text: String = packages
            .iter()
            .flat_map(|package| sources(&root.join(package).join("src")))
            .map(|file| fs::read_to_string(file).unwrap())
            .collect();
        let is_end_of_word = |c: char| !c.is_alphanumeric() && c != '_';
        // The settings combine some of themselves.
        let settings = fs::read_to_string(root.join("types/src/settings.rs")).unwrap();
        let combined = settings.split("self.").skip(1).filter_map(|rest| rest.split(is_end_of_word).next());
        let words: std::collections::HashSet<&str> = text.split(is_end_of_word).chain(combined).collect();
        for name in Settings::NAMES {
            assert!(words.contains(name.to_lowercase().as_str()), "{name} has no effect");
        }
    }
}
