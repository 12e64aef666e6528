//! The load of idle daemons on their database, in every role, also with an instance. See docs/decisions/0063.

use std::time::{Duration, Instant};

use muster_testing::{DaemonSetup, MariaDb};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// The maximum number of statements per second and daemon. The promise is 2.
const MAX_RATE: f64 = 1.85;
/// The time over which statements are counted. Some tasks run once a minute.
const WINDOW: Duration = Duration::from_secs(60);
/// The number of attempts. The first window contains the end of the start.
const ATTEMPTS: usize = 4;

/// Starts a server that counts the statements of each user, of which each daemon is one.
fn start_server() -> Option<MariaDb> {
    MariaDb::start_with(&["--userstat=1"])
}

/// Returns the setup of a daemon with its own user of the database.
fn with_user(server: &MariaDb, url: &str, number: usize, setup: DaemonSetup) -> DaemonSetup {
    let user = format!("daemon{number}");
    // The server may know the host by its name or its address.
    for host in ["localhost", "127.0.0.1"] {
        assert!(server.run(&format!("CREATE USER {user}@'{host}'")));
        assert!(server.run(&format!("GRANT ALL ON *.* TO {user}@'{host}'")));
    }
    let (_, rest) = url.split_once('@').unwrap();
    setup.set("DATABASE_URL", &format!("mysql://{user}@{rest}"))
}

/// Returns the number of statements that the server has received from each of some daemons, including those that begin and end
/// transactions.
fn received(server: &MariaDb, daemons: usize) -> Vec<f64> {
    let sql = "SELECT user, select_commands + update_commands + other_commands \
               FROM information_schema.user_statistics WHERE user LIKE 'daemon%' ORDER BY user";
    let rows = server.query(sql).unwrap();
    let counts: Vec<f64> =
        rows.lines().map(|row| row.split_whitespace().last().unwrap().parse().unwrap()).collect();
    assert_eq!(counts.len(), daemons, "{rows}");
    counts
}

/// Waits for a window in which all daemons are idle, and returns their rates in the window with the lowest maximum.
async fn idle_rates(server: &MariaDb, daemons: usize) -> Vec<f64> {
    let mut lowest = vec![f64::INFINITY; daemons];
    let max = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max);
    for _ in 0..ATTEMPTS {
        let (before, started) = (received(server, daemons), Instant::now());
        tokio::time::sleep(WINDOW).await;
        let after = received(server, daemons);
        let seconds = started.elapsed().as_secs_f64();
        let rates: Vec<f64> =
            before.iter().zip(after).map(|(before, after)| (after - before) / seconds).collect();
        println!("statements per second: {rates:.2?}");
        if max(&rates) < max(&lowest) {
            lowest = rates;
        }
        if max(&lowest) <= MAX_RATE {
            break;
        }
    }
    lowest
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_daemon_sends_few_statements() {
    let Some(server) = start_server() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path()).arguments(&["--simulate", "1"]);
    let _daemon = with_user(&server, &server.fresh_database(), 1, setup).start();
    let rates = idle_rates(&server, 1).await;
    assert!(rates[0] <= MAX_RATE, "{rates:.2?} statements per second");
    assert!(rates[0] > 0.3, "a daemon checks in, so the count is wrong: {rates:.2?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_daemons_of_a_cluster_send_few_statements() {
    let Some(server) = start_server() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let url = server.fresh_database();
    let member = |number: usize| -> DaemonSetup {
        let directory = directory.path().join(number.to_string());
        std::fs::create_dir_all(&directory).unwrap();
        let setup = setup(&directory)
            .arguments(&["--simulate", "1", "--simulate-from", &number.to_string()])
            .set("AUTH_SECRET_SEED", "the seed of the whole cluster")
            .set("SYSTEM_KEY", "the first key");
        with_user(&server, &url, number, setup)
    };
    let daemons = [1, 2, 3].map(|number| member(number).start());
    let token = daemons[0].log_in("system", "the first key").await;
    let network = json!({"name": "blue", "netblock": "10.0.0.0/24"});
    let (status, record) = daemons[0].call(&token, Method::POST, "/networks", Some(network)).await;
    assert_eq!(status, 200, "{record}");
    let path = format!("/networks/{}", record["uuid"].as_str().unwrap());
    wait_for("the network", async || {
        let (_, record) = daemons[0].call(&token, Method::GET, &path, None).await;
        (record["state"] == "created").then_some(())
    })
    .await;
    let instance = json!({
        "name": "web", "cpus": 1, "memory": 64, "disk": [{"size": 1}], "network": [{"network_uuid": "blue"}],
        "placed_on": "sim-1",
    });
    let (status, record) = daemons[0].call(&token, Method::POST, "/instances", Some(instance)).await;
    assert_eq!(status, 200, "{record}");
    let path = format!("/instances/{}", record["uuid"].as_str().unwrap());
    wait_for("the instance", async || {
        let (_, record) = daemons[0].call(&token, Method::GET, &path, None).await;
        (record["state"] == "created" && record["power_state"] == "on").then_some(())
    })
    .await;
    let rates = idle_rates(&server, 3).await;
    assert!(rates.iter().all(|rate| *rate <= MAX_RATE), "{rates:.2?} statements per second");
    assert!(rates.iter().all(|rate| *rate > 0.3), "daemons check in, so the count is wrong: {rates:.2?}");

    // The first daemon has all roles.
    let (_, nodes) = daemons[1].call(&token, Method::GET, "/nodes", None).await;
    let roles =
        |node: &Value| json!([node["name"], node["is_cluster_maintainer"], node["is_active_network_node"]]);
    let expected =
        [json!(["sim-1", true, true]), json!(["sim-2", false, false]), json!(["sim-3", false, false])];
    assert_eq!(nodes.as_array().unwrap().iter().map(roles).collect::<Vec<_>>(), expected, "{nodes}");
}
