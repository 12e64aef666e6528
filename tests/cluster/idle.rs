//! The load of idle daemons on their database.

use std::time::{Duration, Instant};

use muster_testing::{DaemonSetup, MariaDb};

use crate::setup;

/// The maximum number of statements per second and daemon.
const MAX_RATE: f64 = 2.75;
/// The time over which statements are counted.
const WINDOW: Duration = Duration::from_secs(15);
/// The number of attempts. Some tasks run once a minute, and the first windows contain the end of the start.
const ATTEMPTS: usize = 5;

/// Returns the number of statements that the server has received, including those that begin and end transactions.
fn received(server: &MariaDb) -> f64 {
    let status = server.query("SHOW GLOBAL STATUS LIKE 'Questions'").unwrap();
    status.split_whitespace().last().unwrap().parse().unwrap()
}

/// Waits for a window in which daemons are idle, and returns the rate in the window with the lowest one.
async fn idle_rate(server: &MariaDb, daemons: u8) -> f64 {
    let mut lowest = f64::INFINITY;
    for _ in 0..ATTEMPTS {
        let (before, started) = (received(server), Instant::now());
        tokio::time::sleep(WINDOW).await;
        // The second count is a statement, too.
        let count = received(server) - before - 1.0;
        lowest = lowest.min(count / started.elapsed().as_secs_f64() / f64::from(daemons));
        if lowest <= MAX_RATE {
            break;
        }
    }
    lowest
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_daemon_sends_few_statements() {
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).arguments(&["--simulate", "1"]);
    let _daemon = daemon.set("DATABASE_URL", &server.fresh_database()).start();
    let rate = idle_rate(&server, 1).await;
    assert!(rate <= MAX_RATE, "{rate:.2} statements per second");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_daemons_of_a_cluster_send_few_statements() {
    let Some(server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let url = server.fresh_database();
    let member = |number: u8| -> DaemonSetup {
        let directory = directory.path().join(number.to_string());
        std::fs::create_dir_all(&directory).unwrap();
        setup(&directory)
            .arguments(&[])
            .set("NODE_NAME", &format!("n{number}"))
            .set("NODE_MESH_IP", &format!("127.0.8.{number}"))
            .set("DATABASE_URL", &url)
            .set("AUTH_SECRET_SEED", "the seed of the whole cluster")
            .set("SYSTEM_KEY", "the first key")
    };
    let _daemons = [1, 2, 3].map(|number| member(number).start());
    let rate = idle_rate(&server, 3).await;
    assert!(rate <= MAX_RATE, "{rate:.2} statements per second and daemon");
}
