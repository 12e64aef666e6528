//! Every periodic task of a daemon, on one page.

use std::sync::Arc;
use std::time::Duration;

use muster_store::schema;
use muster_types::settings::Settings;

use super::task::{Run, RunsOn, Task};
use super::{
    agent_operations, agents, artifact_watch, backups, changes, checkin, cleaner, console_sessions,
    event_prune, event_rows, event_streams, instance_watch, key_sweep, maintainer, mesh, network_role,
    network_usage, network_watch, networks, node_watch, quarantine, replicas, storage, vm_usage, vms,
    webhooks,
};
use crate::health;
use crate::objects::agent_operation::end::expire_overdue;
use crate::objects::rebalance;

/// Every periodic task, in the order in which the maintainer runs its own.
pub static TASKS: &[Task] = &[
    Task {
        name: "changes",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| changes::POLL_INTERVAL,
        last_run: None,
        purpose: "notices in one statement what other daemons changed, and notifies the tasks of this daemon",
        run: Run::Loop(|app, stop| Box::pin(changes::run(app, stop))),
    },
    Task {
        name: "networks",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| networks::RECONCILE_INTERVAL,
        last_run: None,
        purpose: "applies networks to this daemon's nodes, repairs drift, removes unwanted networks",
        run: Run::Loop(|app, stop| Box::pin(networks::run(app, stop))),
    },
    Task {
        name: "network node",
        runs_on: RunsOn::EveryDaemon,
        interval: network_role::renew_interval,
        last_run: None,
        purpose: "competes for the role of the active network node and opens the gate of its routers",
        run: Run::Loop(|app, stop| Box::pin(network_role::run(app, stop))),
    },
    Task {
        name: "vms",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| vms::RECONCILE_INTERVAL,
        last_run: None,
        purpose: "records power changes of VMs and compares VMs with the instances of the database",
        run: Run::Loop(|app, stop| Box::pin(vms::run(app, stop))),
    },
    Task {
        name: "agents",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| agents::RECONCILE_INTERVAL,
        last_run: None,
        purpose: "records the reports of guest agents",
        run: Run::Loop(|app, stop| Box::pin(agents::run(app, stop))),
    },
    Task {
        name: "agent operations",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| agent_operations::RECONCILE_INTERVAL,
        last_run: None,
        purpose: "runs commands and transfers files in guests, in order for each instance",
        run: Run::Loop(|app, stop| Box::pin(agent_operations::run(app, stop))),
    },
    Task {
        name: "storage",
        runs_on: RunsOn::EveryDaemon,
        interval: storage::interval,
        last_run: None,
        purpose: "matches files of nodes with blobs, verifies checksums, copies blobs that have too few copies",
        run: Run::Loop(|app, stop| Box::pin(storage::run(app, stop))),
    },
    Task {
        name: "replicas",
        runs_on: RunsOn::EveryDaemon,
        interval: replicas::interval,
        last_run: None,
        purpose: "copies the disks of instances with replicas to other nodes, removes replicas that are not needed",
        run: Run::Loop(|app, stop| Box::pin(replicas::run(app, stop))),
    },
    Task {
        name: "event streams",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| event_streams::POLL_INTERVAL,
        last_run: None,
        purpose: "reads new events of all daemons for the event streams of this daemon, while there are any",
        run: Run::Loop(|app, stop| Box::pin(event_streams::run(app, stop))),
    },
    Task {
        name: "console sessions",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| console_sessions::CHECK_INTERVAL,
        last_run: None,
        purpose: "ends consoles whose keys were deleted, replaced or have expired, while there are any",
        run: Run::Loop(|app, stop| Box::pin(console_sessions::run(app, stop))),
    },
    Task {
        name: "event rows",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| event_rows::SAMPLE_INTERVAL,
        last_run: None,
        purpose: "samples the number of stored events for the metrics",
        run: Run::Loop(|app, stop| Box::pin(event_rows::run(app, stop))),
    },
    Task {
        name: "maintainer",
        runs_on: RunsOn::EveryDaemon,
        interval: |_| maintainer::TICK_INTERVAL,
        last_run: None,
        purpose: "competes for the maintainer lease and runs the maintainer's tasks while it owns the lease",
        run: Run::Loop(|app, stop| Box::pin(maintainer::run(app, TASKS, stop))),
    },
    Task {
        name: "health",
        runs_on: RunsOn::EveryDaemonWhileDraining,
        interval: |_| health::CHECK_INTERVAL,
        last_run: None,
        purpose: "checks whether the database answers, for /readyz",
        run: Run::Loop(|app, _| Box::pin(health::watch(Arc::clone(&app.health), Arc::clone(&app.store)))),
    },
    Task {
        name: "check-in",
        runs_on: RunsOn::EveryDaemonWhileDraining,
        interval: |settings| Duration::from_secs_f64(settings.node_checkin_interval),
        last_run: None,
        purpose: "reports that this daemon's nodes are alive, and their resources",
        run: Run::Loop(|app, _| Box::pin(checkin::run(app))),
    },
    Task {
        name: "mesh probes",
        runs_on: RunsOn::EveryDaemonWhileDraining,
        interval: mesh::probe_interval,
        last_run: None,
        purpose: "checks whether this daemon reaches some of the other nodes",
        run: Run::Loop(|app, stop| Box::pin(mesh::run(app, stop))),
    },
    Task {
        name: "network usage",
        runs_on: RunsOn::EveryDaemonWhileDraining,
        interval: |settings| Duration::from_secs(settings.usage_event_frequency),
        last_run: None,
        purpose: "records the traffic of networks as usage events",
        run: Run::Pass(|app| Box::pin(async { network_usage::run(app).await.map(|()| false) })),
    },
    Task {
        name: "instance usage",
        runs_on: RunsOn::EveryDaemonWhileDraining,
        interval: |settings| Duration::from_secs(settings.usage_event_frequency),
        last_run: None,
        purpose: "records the resource usage of VMs as usage events",
        run: Run::Pass(|app| Box::pin(async { vm_usage::run(app).await.map(|()| false) })),
    },
    Task {
        name: "cleaner",
        runs_on: RunsOn::Maintainer,
        interval: |settings| delay_quarter(settings, MAX_CLEANER_INTERVAL),
        last_run: None,
        purpose: "removes the rows of objects that were deleted or finished CLEANER_DELAY seconds ago",
        run: Run::Pass(|app| Box::pin(cleaner::run(app))),
    },
    Task {
        name: "node watch",
        runs_on: RunsOn::Maintainer,
        interval: |_| maintainer::TICK_INTERVAL,
        last_run: None,
        purpose: "marks nodes that stopped checking in as missing",
        // Concurrent with the others, which must not delay it.
        run: Run::CancellablePass(|app| {
            Box::pin(async {
                if node_watch::may_have_silent_nodes(app) {
                    node_watch::run(app).await?;
                }
                Ok(false)
            })
        }),
    },
    Task {
        name: "migrations",
        runs_on: RunsOn::Maintainer,
        interval: |_| MIGRATION_INTERVAL,
        last_run: None,
        purpose: "applies migrations that are held back, once all nodes support them",
        run: Run::CancellablePass(|app| {
            Box::pin(async {
                schema::apply_held(&app.store).await?;
                Ok(false)
            })
        }),
    },
    Task {
        name: "network watch",
        runs_on: RunsOn::Maintainer,
        interval: repair_interval,
        last_run: None,
        purpose: "repairs networks whose operation ended without a result",
        run: Run::Pass(|app| Box::pin(async { network_watch::run(app).await.map(|()| false) })),
    },
    Task {
        name: "instance watch",
        runs_on: RunsOn::Maintainer,
        interval: repair_interval,
        last_run: None,
        purpose: "repairs instances whose operation ended without a result, or whose node was deleted",
        run: Run::Pass(|app| Box::pin(async { instance_watch::run(app).await.map(|()| false) })),
    },
    Task {
        name: "artifact watch",
        runs_on: RunsOn::Maintainer,
        interval: repair_interval,
        last_run: None,
        purpose: "marks artifacts whose fetch ended without a result as failed",
        run: Run::Pass(|app| Box::pin(async { artifact_watch::run(app).await.map(|()| false) })),
    },
    Task {
        name: "unused blobs",
        runs_on: RunsOn::Maintainer,
        interval: repair_interval,
        last_run: None,
        purpose: "deletes blobs that nothing has referenced for BLOB_DELETION_DELAY seconds",
        run: Run::Pass(|app| Box::pin(async { artifact_watch::delete_unused(app).await.map(|()| false) })),
    },
    Task {
        name: "agent operation expiry",
        runs_on: RunsOn::Maintainer,
        interval: |_| maintainer::TICK_INTERVAL,
        last_run: None,
        purpose: "ends agent operations whose deadline has passed, also those of nodes that are down",
        run: Run::Pass(|app| {
            Box::pin(async {
                if app.cluster_changes.may_have_agent_operations() {
                    expire_overdue(app).await?;
                }
                Ok(false)
            })
        }),
    },
    Task {
        name: "address quarantine",
        runs_on: RunsOn::Maintainer,
        interval: quarantine_interval,
        last_run: None,
        purpose: "frees addresses that were released IP_DELETION_HALO_DURATION seconds ago",
        run: Run::Pass(|app| {
            Box::pin(async {
                if app.cluster_changes.may_have_quarantined_addresses() {
                    quarantine::run(app).await?;
                }
                Ok(false)
            })
        }),
    },
    Task {
        name: "webhooks",
        runs_on: RunsOn::Maintainer,
        interval: |_| maintainer::TICK_INTERVAL,
        last_run: None,
        purpose: "queues events for webhooks and sends the deliveries that are due",
        run: Run::CancellablePass(|app| {
            Box::pin(async {
                if app.cluster_changes.may_have_webhooks() {
                    webhooks::run(app).await?;
                }
                Ok(false)
            })
        }),
    },
    Task {
        name: "webhook deliveries",
        runs_on: RunsOn::Maintainer,
        interval: |_| webhooks::PRUNE_INTERVAL,
        last_run: None,
        purpose: "removes deliveries that were finished some days ago, and webhooks of deleted namespaces",
        run: Run::Pass(|app| {
            Box::pin(async {
                if app.cluster_changes.may_have_webhooks() { webhooks::prune(app).await } else { Ok(false) }
            })
        }),
    },
    Task {
        name: "key sweep",
        runs_on: RunsOn::Maintainer,
        interval: |settings| Duration::from_secs(settings.key_sweep_interval),
        last_run: Some("SCHEDULED_TASK_LAST_RUN_KEY_SWEEP"),
        purpose: "deletes keys that expired NAMESPACE_KEY_REAP_GRACE seconds ago",
        run: Run::Pass(|app| Box::pin(async { key_sweep::run(app).await.map(|_| false) })),
    },
    Task {
        name: "rebalance",
        runs_on: RunsOn::Maintainer,
        interval: rebalance_interval,
        last_run: Some("SCHEDULED_TASK_LAST_RUN_REBALANCE"),
        purpose: "migrates instances from full nodes to empty ones, if REBALANCE_INTERVAL is set",
        run: Run::CancellablePass(|app| {
            Box::pin(async { rebalance::run_periodically(app).await.map(|()| false) })
        }),
    },
    Task {
        name: "backup",
        runs_on: RunsOn::Maintainer,
        interval: backups::interval,
        last_run: Some(backups::LAST_RUN),
        purpose: "writes a backup to BACKUP_DIRECTORY and removes older ones, if BACKUP_INTERVAL is set",
        run: Run::CancellablePass(|app| Box::pin(async { backups::run(app).await.map(|()| false) })),
    },
    Task {
        name: "event prune",
        runs_on: RunsOn::Maintainer,
        interval: |settings| Duration::from_secs(settings.event_prune_interval),
        last_run: Some("SCHEDULED_TASK_LAST_RUN_PRUNE_EVENTS"),
        purpose: "removes events that are older than their retention",
        run: Run::CancellablePass(|app| Box::pin(async { event_prune::run(app).await.map(|()| false) })),
    },
    Task {
        name: "event budget",
        runs_on: RunsOn::Maintainer,
        interval: |_| event_prune::BUDGET_INTERVAL,
        last_run: None,
        purpose: "removes the oldest events above EVENT_STORE_MAX_MB",
        run: Run::CancellablePass(|app| {
            Box::pin(async { event_prune::enforce_budget(app).await.map(|()| false) })
        }),
    },
];

/// The maximum interval of the cleaner, which reads one statement for each type of object.
const MAX_CLEANER_INTERVAL: Duration = Duration::from_secs(300);
/// How often the maintainer checks whether all nodes support a migration that is held back.
const MIGRATION_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum interval of the tasks that repair objects.
const MAX_REPAIR_INTERVAL: Duration = Duration::from_secs(120);

/// Returns a tenth of `IP_DELETION_HALO_DURATION`, between one second and one minute.
fn quarantine_interval(settings: &Settings) -> Duration {
    Duration::from_secs(settings.ip_deletion_halo_duration)
        .div_f64(10.0)
        .clamp(Duration::from_secs(1), Duration::from_secs(60))
}

/// Returns `REBALANCE_INTERVAL`, or an interval that never ends if it is not set.
fn rebalance_interval(settings: &Settings) -> Duration {
    match settings.rebalance_interval {
        0 => Duration::MAX,
        seconds => Duration::from_secs(seconds),
    }
}

fn repair_interval(settings: &Settings) -> Duration {
    delay_quarter(settings, MAX_REPAIR_INTERVAL)
}

/// Returns a quarter of `CLEANER_DELAY`, between one second and `max`.
fn delay_quarter(settings: &Settings, max: Duration) -> Duration {
    Duration::from_secs(settings.cleaner_delay).div_f64(4.0).clamp(Duration::from_secs(1), max)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn tasks_have_unique_names_and_a_purpose() {
        let names: HashSet<_> = TASKS.iter().map(|task| task.name).collect();
        assert_eq!(names.len(), TASKS.len());
        assert!(TASKS.iter().all(|task| !task.purpose.is_empty()));
    }

    #[test]
    fn rebalancing_is_periodic_only_with_its_setting() {
        assert_eq!(rebalance_interval(&Settings::defaults()), Duration::MAX);
        let settings = Settings::from_pairs(&[("REBALANCE_INTERVAL", "3600")]).unwrap();
        assert_eq!(rebalance_interval(&settings), Duration::from_secs(3600));
    }

    #[test]
    fn maintainer_runs_only_passes_and_only_it_cancels_them() {
        for task in TASKS {
            match task.run {
                Run::Loop(_) => assert_ne!(task.runs_on, RunsOn::Maintainer, "{}", task.name),
                Run::Pass(_) => {}
                Run::CancellablePass(_) => assert_eq!(task.runs_on, RunsOn::Maintainer, "{}", task.name),
            }
        }
    }
}
