//! `muster doctor`: checks whether this host can run a node, and says what to do about what it lacks.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use muster_client::Format;
use muster_store::{DatabaseFacts, Store, StoreError};
use muster_types::host_check::{CheckState, HostCheck};
use muster_types::settings::{Settings, mask_password};
use muster_types::time::now;
use nix::unistd::geteuid;

use crate::serve::database_url;
use crate::{config, rootless};

/// The skew of the clock above which the daemon records warnings, in seconds.
const CLOCK_WARNING: f64 = 1.0;
/// The skew above which a node acquires no leases and creates no tokens.
const CLOCK_FAILURE: f64 = 5.0;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The exit status is 1 if a check failed, and 0 if there are only warnings. `muster node show` has the same \
                  checks of every node."
)]
pub(crate) struct Arguments {
    /// Data directory of the daemon
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Runs the checks and prints them.
pub(crate) async fn run(arguments: Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let settings = config::load(arguments.config.as_deref())?;
    let checks = checks(&settings, &arguments.data_dir).await?;
    let text = match format.is_structured() {
        true => format.render(&serde_json::to_value(&checks)?),
        false => report(&checks),
    };
    crate::stdout::print(text.as_bytes())?;
    let has_failed = checks.iter().any(|check| check.state == CheckState::Failed);
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs all checks.
async fn checks(settings: &Settings, data: &Path) -> anyhow::Result<Vec<HostCheck>> {
    let (owned, storage) = (settings.clone(), existing_dir(&storage_dir(settings, data)));
    let mut checks = tokio::task::spawn_blocking(move || muster_node::check_host(&owned, &storage)).await?;
    if !geteuid().is_root() {
        let rootless = rootless::checks().await?;
        if rootless.iter().all(|check| check.state == CheckState::Passed) {
            checks.iter_mut().filter(|check| check.name == "capabilities").for_each(|check| {
                let detail = "not root, so `muster up` runs the cluster in its own namespaces";
                *check = HostCheck::passed(&check.name, &check.affects, detail);
            });
        }
        checks.extend(rootless);
    }
    let url = database_url(settings, data);
    let before = now();
    let found = Store::inspect(url.expose()).await;
    checks.extend(database_checks(&mask_password(url.expose()), found, f64::midpoint(before, now())));
    Ok(checks)
}

fn storage_dir(settings: &Settings, data: &Path) -> PathBuf {
    if settings.storage_path.is_empty() { data.to_owned() } else { PathBuf::from(&settings.storage_path) }
}

/// Returns the directory, or the nearest parent that exists: the first start creates it there.
fn existing_dir(path: &Path) -> PathBuf {
    path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/")).to_owned()
}

/// Checks the database and the clock of this host against that of the database. `now` is the time of the host.
fn database_checks(url: &str, found: Result<Option<DatabaseFacts>, StoreError>, now: f64) -> Vec<HostCheck> {
    let (name, affects) = ("database", "everything");
    let clock = ("clock", "leases, tokens and check-ins");
    match found {
        Err(error) => {
            let check = HostCheck::failed(name, affects, format!("{url}: {error}"));
            let fix = if url.starts_with("mysql:") { "systemctl start mariadb" } else { "muster config" };
            vec![check.with_fix(fix)]
        }
        Ok(None) => vec![
            HostCheck::passed(name, affects, format!("{url}: the first start creates it")),
            HostCheck::passed(clock.0, clock.1, "it is also that of the database"),
        ],
        Ok(Some(facts)) => {
            let skew = now - facts.time;
            let detail = format!("{skew:.1} s ahead of the database");
            let check = match skew.abs() {
                skew if skew >= CLOCK_FAILURE => HostCheck::failed(clock.0, clock.1, detail),
                skew if skew >= CLOCK_WARNING => HostCheck::warning(clock.0, clock.1, detail),
                _ => HostCheck::passed(clock.0, clock.1, detail),
            };
            let check = if check.state == CheckState::Passed {
                check
            } else {
                check.with_fix("timedatectl set-ntp true")
            };
            vec![HostCheck::passed(name, affects, format!("{} at {url}", facts.version)), check]
        }
    }
}

/// Formats checks for people.
fn report(checks: &[HostCheck]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let _ = writeln!(text, "{:8} {:width$}  {}", check.state.as_str(), check.name, check.detail);
        if check.state != CheckState::Passed {
            let _ = writeln!(text, "{:8} {:width$}  affects: {}", "", "", check.affects);
        }
        if let Some(fix) = &check.fix {
            let _ = writeln!(text, "{:8} {:width$}  fix:     {fix}", "", "");
        }
    }
    let count = |state| checks.iter().filter(|check| check.state == state).count();
    let (failed, warnings) = (count(CheckState::Failed), count(CheckState::Warning));
    let _ = writeln!(text, "{} checks: {failed} failed, {warnings} with a warning", checks.len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_what_is_affected_and_the_fix() {
        let checks = [
            HostCheck::passed("qemu", "running guests", "QEMU is installed"),
            HostCheck::warning("kvm", "the speed of guests", "emulated").with_fix("modprobe kvm_intel"),
        ];
        assert_eq!(
            report(&checks),
            "ok       qemu  QEMU is installed\n\
             warning  kvm   emulated\n               \
             affects: the speed of guests\n               \
             fix:     modprobe kvm_intel\n\
             2 checks: 0 failed, 1 with a warning\n"
        );
    }

    #[test]
    fn checks_the_clock_against_the_database() {
        let at = |time| {
            let facts = DatabaseFacts { version: "MariaDB 10.11".into(), time };
            database_checks("mysql://x", Ok(Some(facts)), 1000.0).remove(1)
        };
        assert_eq!(at(1000.2).state, CheckState::Passed);
        assert_eq!(at(1002.0).state, CheckState::Warning);
        let found = at(990.0);
        assert_eq!((found.state, &*found.detail), (CheckState::Failed, "10.0 s ahead of the database"));
        assert!(found.fix.is_some());
        let unreachable = Err(StoreError::Unavailable("refused".into()));
        let found = database_checks("mysql://x", unreachable, 0.0);
        assert_eq!((found.len(), found[0].state), (1, CheckState::Failed));
        assert!(database_checks("sqlite:x", Ok(None), 0.0)[0].detail.contains("first start"));
    }

    #[test]
    fn space_is_that_of_the_nearest_existing_parent() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(existing_dir(&dir.path().join("a/b")), dir.path());
        assert_eq!(existing_dir(Path::new("/")), Path::new("/"));
    }
}
