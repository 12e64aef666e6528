//! The servers of a MariaDB URL, and which of them is used. See docs/decisions/0058.
//!
//! All daemons use the first server that is writable and, in a Galera cluster, synchronized. When the server in use
//! fails or stops responding, all its connections are dropped and the next usable one takes over; as soon as an earlier
//! one is usable again, new connections go there. A URL with one server has none of this: there is nothing to choose.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::url::ServerAddress;
use super::{CONNECT_TIMEOUT, failure, with_timeout};
use crate::error::StoreError;

/// How long the state of a server may take to be read, including the connection.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a response may take before the server is probed.
const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// How often the servers that are preferred to the one in use are probed.
const RETURN_INTERVAL: Duration = Duration::from_secs(3);
/// How often all servers are probed while none is usable.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// The row that counts changes of the server in use, by which a server that lacks later writes is recognized.
const FAILOVERS: &str = "database_failovers";

/// What a server reports about itself.
#[derive(Debug, Clone, Copy, Default)]
struct ServerState {
    read_only: bool,
    galera: bool,
    /// Whether it may be written to: always, unless it belongs to a Galera cluster.
    synchronized: bool,
    /// The number of failovers that its data contains.
    failovers: i64,
}

impl ServerState {
    /// Returns why the server cannot be used.
    fn problem(self, known_failovers: i64) -> Option<&'static str> {
        if self.read_only {
            Some("the server is read-only")
        } else if !self.synchronized {
            Some("the server is not synchronized with the Galera cluster")
        } else if self.failovers < known_failovers {
            Some("the server lacks writes that were made to another one, make it a replica of that one first")
        } else {
            None
        }
    }
}

/// Why the state of a server is not known.
#[derive(Debug)]
enum ProbeError {
    /// It did not respond within [`PROBE_TIMEOUT`].
    NoResponse,
    Failed(StoreError),
}

/// Connects to a server and reads its state.
async fn probe(server: &ServerAddress) -> Result<ServerState, StoreError> {
    let mut conn = Conn::new(server.opts.clone()).await.map_err(failure)?;
    let state = read_state(&mut conn).await;
    let _ = conn.disconnect().await;
    state
}

async fn read_state(conn: &mut Conn) -> Result<ServerState, StoreError> {
    let sql = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'wsrep_on')";
    let mut values: Vec<(String, String)> = conn.query(sql).await.map_err(failure)?;
    let sql = "SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_local_state', 'wsrep_cluster_status')";
    values.extend(conn.query::<(String, String), _>(sql).await.map_err(failure)?);
    let has = |name: &str, value: &str| {
        values.iter().any(|(n, v)| n.eq_ignore_ascii_case(name) && v.eq_ignore_ascii_case(value))
    };
    let galera = has("wsrep_on", "ON");
    // State 4 is Synced. Another server may be read, but its writes could be rejected.
    let synchronized = !galera || has("wsrep_local_state", "4") && has("wsrep_cluster_status", "Primary");
    let failovers = if synchronized { read_failovers(conn).await? } else { 0 };
    Ok(ServerState { read_only: !has("read_only", "OFF"), galera, synchronized, failovers })
}

async fn read_failovers(conn: &mut Conn) -> Result<i64, StoreError> {
    let sql = "SELECT value FROM cluster_values WHERE name = ?";
    match conn.exec_first::<String, _, _>(sql, (FAILOVERS,)).await {
        Ok(value) => value.map_or(Ok(0), |value| {
            value.parse().map_err(|_| StoreError::Internal(format!("the number of failovers is {value:?}")))
        }),
        // A new database has no tables.
        Err(mysql_async::Error::Server(error)) if error.code == 1146 => Ok(0),
        Err(error) => Err(failure(error)),
    }
}

/// Returns the options of the connections to a server.
fn pool_opts(server: &ServerAddress, galera: bool) -> OptsBuilder {
    let constraints = PoolConstraints::new(1, 24).expect("1 is less than 24");
    let pool_opts = PoolOpts::default()
        .with_constraints(constraints)
        .with_reset_connection(false)
        // By default all but one are closed as soon as they are idle, so that every burst reconnects. Some tasks run every
        // minute.
        .with_inactive_connection_ttl(Duration::from_secs(90));
    let mut variables = vec![
        "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        // The conversion of local times to Unix time is ambiguous for an hour of each year.
        "time_zone = '+00:00'",
        // Less than the timeout of a statement, so that a lock is a conflict and not an outage.
        "innodb_lock_wait_timeout = 5",
    ];
    if galera {
        // A read waits for the writes that other servers of the cluster have acknowledged.
        variables.push("wsrep_sync_wait = 1");
    }
    let setup = [
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED".to_owned(),
        format!("SET SESSION {}", variables.join(", SESSION ")),
    ];
    OptsBuilder::from_opts(server.opts.clone())
        .pool_opts(pool_opts)
        // Updates count the rows that they match, as in SQLite, not those that they change.
        .client_found_rows(true)
        .stmt_cache_size(128)
        .tcp_keepalive(Some(Duration::from_secs(30)))
        .prefer_socket(false)
        .setup(setup.to_vec())
}

/// The server in use, with its connections.
pub(super) struct ActiveServer {
    /// The position in the URL.
    position: usize,
    name: String,
    pool: Pool,
    /// Whether other servers may be written to at the same time.
    pub(super) is_galera: bool,
    failed: watch::Sender<bool>,
    suspect: Arc<Notify>,
    /// Whether another server may take over.
    has_alternatives: bool,
}

impl ActiveServer {
    pub(super) async fn connection(&self) -> Result<Conn, StoreError> {
        self.response(CONNECT_TIMEOUT, self.pool.get_conn()).await
    }

    /// Waits for a response of the server, with a timeout, or until the server has failed.
    pub(super) async fn response<T>(
        &self,
        limit: Duration,
        response: impl Future<Output = Result<T, mysql_async::Error>>,
    ) -> Result<T, StoreError> {
        let response = with_timeout(limit, response);
        if !self.has_alternatives {
            return response.await;
        }
        let mut failed = self.failed.subscribe();
        let suspicion = async {
            loop {
                sleep(SUSPECT_AFTER).await;
                self.suspect.notify_one();
            }
        };
        tokio::select! {
            response = response => response,
            _ = failed.wait_for(|failed| *failed) => {
                Err(StoreError::Unavailable(format!("database server {} failed", self.name)))
            }
            () = suspicion => unreachable!("it does not end"),
        }
    }

    /// Converts the failure of a statement of a transaction, which the server rolls back: the transaction can be
    /// repeated on another server.
    pub(super) fn repeatable(&self, error: StoreError) -> StoreError {
        match error {
            StoreError::Unavailable(reason) | StoreError::ReadOnly(reason) if self.has_alternatives => {
                self.suspect.notify_one();
                StoreError::Conflict(reason)
            }
            other => other,
        }
    }

    /// Closes the connections: the idle ones now, the others when their transaction ends or, if the server has failed,
    /// now, too.
    fn retire(&self, failed: bool) {
        self.failed.send_replace(failed);
        let pool = self.pool.clone();
        tokio::spawn(async move {
            // A server that does not respond may keep this waiting, but its connections are no longer used.
            let _ = timeout(Duration::from_secs(60), pool.disconnect()).await;
        });
    }
}

/// The result of the last check.
#[derive(Default)]
struct Selection {
    /// The server in use; `None` while no server is usable.
    active: Option<Arc<ActiveServer>>,
    /// The number of checks so far.
    checks: u64,
    /// The highest number of failovers that the data of a server contained.
    failovers: i64,
}

pub(super) struct Servers {
    addresses: Vec<ServerAddress>,
    selection: watch::Sender<Selection>,
    suspect: Arc<Notify>,
    closed: watch::Sender<bool>,
}

impl Servers {
    /// Connects to the first usable server.
    pub(super) async fn open(addresses: Vec<ServerAddress>) -> Result<Arc<Self>, StoreError> {
        let servers = Arc::new(Self {
            addresses,
            selection: watch::Sender::default(),
            suspect: Arc::default(),
            closed: watch::Sender::new(false),
        });
        if let [only] = &*servers.addresses {
            let state = timeout(CONNECT_TIMEOUT, probe(only)).await;
            let state =
                state.map_err(|_| StoreError::Unavailable(format!("{}: no response", only.name)))??;
            servers.activate(Some((0, state)), 0);
        } else {
            servers.check().await?;
            tokio::spawn(Arc::clone(&servers).monitor());
        }
        Ok(servers)
    }

    /// Returns the server in use. While none is usable, waits for one.
    pub(super) async fn active(&self) -> Result<Arc<ActiveServer>, StoreError> {
        let mut selection = self.selection.subscribe();
        let active =
            timeout(CONNECT_TIMEOUT, selection.wait_for(|selection| selection.active.is_some())).await;
        let active = active.ok().and_then(Result::ok).and_then(|selection| selection.active.clone());
        active.ok_or_else(|| StoreError::Unavailable("no database server is usable".into()))
    }

    /// Waits until the server in use has been checked after a failure, if another one may take over.
    pub(super) async fn recheck(&self, active: &ActiveServer) {
        if !active.has_alternatives {
            return;
        }
        let mut selection = self.selection.subscribe();
        let seen = selection.borrow().checks;
        self.suspect.notify_one();
        let checked = selection.wait_for(|selection| selection.checks > seen || *active.failed.borrow());
        // Without a result, the next attempt fails as well.
        let _ = timeout(CONNECT_TIMEOUT, checked).await;
    }

    async fn monitor(self: Arc<Self>) {
        let mut closed = self.closed.subscribe();
        loop {
            let position = self.selection.borrow().active.as_ref().map(|active| active.position);
            let pause = async {
                match position {
                    Some(0) => std::future::pending().await,
                    Some(_) => sleep(RETURN_INTERVAL).await,
                    None => sleep(SEARCH_INTERVAL).await,
                }
            };
            tokio::select! {
                _ = closed.wait_for(|closed| *closed) => return,
                () = self.suspect.notified() => {}
                () = pause => {}
            }
            // The reasons were logged when the last server failed.
            let _ = self.check().await;
        }
    }

    /// Probes all servers and uses the first usable one.
    async fn check(&self) -> Result<(), StoreError> {
        let states = self.probe_all().await;
        let known = states.iter().flatten().map(|state| state.failovers);
        let known = known.fold(self.selection.borrow().failovers, i64::max);
        let problems: Vec<Option<String>> = states
            .iter()
            .map(|state| match state {
                Ok(state) => state.problem(known).map(str::to_owned),
                Err(ProbeError::NoResponse) => Some("no response".to_owned()),
                Err(ProbeError::Failed(error)) => Some(error.to_string()),
            })
            .collect();
        let active = self.selection.borrow().active.clone();
        let usable = problems.iter().position(Option::is_none);
        let position = active.as_ref().map(|active| active.position);
        // While no server responds in time, the connections of the one in use are the best there is: everything may
        // just be slow.
        let is_only_slow = usable.is_none()
            && position.is_some_and(|position| matches!(states[position], Err(ProbeError::NoResponse)));
        if !is_only_slow && (usable.is_none() || usable != position) {
            let next = usable.and_then(|position| Some((position, *states[position].as_ref().ok()?)));
            // Callers that lose their connection find the new server.
            self.activate(next, known);
            if let Some(active) = active {
                let problem = problems[active.position].as_deref();
                match problem {
                    Some(problem) => tracing::warn!(server = active.name, problem, "left database server"),
                    None => tracing::info!(server = active.name, "left database server for an earlier one"),
                }
                active.retire(problem.is_some());
            }
        }
        self.selection.send_modify(|selection| selection.checks += 1);
        if usable.is_some() {
            return Ok(());
        }
        let names = self.addresses.iter().map(|server| &server.name).zip(problems.into_iter().flatten());
        let reasons: Vec<String> = names.map(|(name, problem)| format!("{name}: {problem}")).collect();
        Err(StoreError::Unavailable(reasons.join("; ")))
    }

    /// Probes all servers at the same time.
    async fn probe_all(&self) -> Vec<Result<ServerState, ProbeError>> {
        let probes = self.addresses.iter().map(|server| {
            let server = server.clone();
            tokio::spawn(async move { timeout(PROBE_TIMEOUT, probe(&server)).await })
        });
        let mut states = Vec::with_capacity(self.addresses.len());
        for probe in probes.collect::<Vec<_>>() {
            states.push(match probe.await {
                Ok(Ok(state)) => state.map_err(ProbeError::Failed),
                Ok(Err(_)) => Err(ProbeError::NoResponse),
                Err(error) => Err(ProbeError::Failed(StoreError::Unavailable(error.to_string()))),
            });
        }
        states
    }

    /// Uses a server from now on, or none.
    fn activate(&self, next: Option<(usize, ServerState)>, known_failovers: i64) {
        let several = self.addresses.len() > 1;
        let active = next.map(|(position, state)| {
            let server = &self.addresses[position];
            Arc::new(ActiveServer {
                position,
                name: server.name.clone(),
                pool: Pool::new(pool_opts(server, state.galera)),
                is_galera: state.galera,
                failed: watch::Sender::new(false),
                suspect: Arc::clone(&self.suspect),
                has_alternatives: several,
            })
        });
        if let Some(active) = active.as_ref().filter(|_| several) {
            tracing::info!(server = active.name, "using database server");
            // A daemon that starts with a later server cannot know that the others did not write to it.
            if self.selection.borrow().checks > 0 || active.position > 0 {
                tokio::spawn(record_failover(
                    Arc::clone(active),
                    self.selection.clone(),
                    known_failovers + 1,
                ));
            }
        }
        self.selection.send_modify(|selection| {
            selection.active = active;
            selection.failovers = known_failovers;
        });
    }

    pub(super) async fn close(&self) {
        self.closed.send_replace(true);
        let active = self.selection.borrow().active.clone();
        if let Some(active) = active
            && let Err(error) = active.pool.clone().disconnect().await
        {
            tracing::warn!(%error, "failed to close the database");
        }
    }

    /// Ends the monitor of a store that was not closed.
    pub(super) fn abandon(&self) {
        self.closed.send_replace(true);
    }
}

/// Counts a failover in the data of the new server. A server without this write lacks others, too.
async fn record_failover(active: Arc<ActiveServer>, selection: watch::Sender<Selection>, failovers: i64) {
    let recorded = async {
        let mut conn = active.connection().await?;
        // Several daemons record at the same time: the number never decreases.
        let sql = "INSERT INTO cluster_values (name, value, version) VALUES (?, ?, 1) \
                   ON DUPLICATE KEY UPDATE value = GREATEST(CAST(value AS SIGNED), CAST(VALUES(value) AS SIGNED))";
        // While a Galera cluster excludes a failed member, writes wait.
        let write = conn.exec_drop(sql, (FAILOVERS, failovers.to_string()));
        active.response(Duration::from_secs(30), write).await
    };
    match recorded.await {
        Ok(()) => selection.send_modify(|selection| selection.failovers = failovers.max(selection.failovers)),
        Err(error) => {
            tracing::warn!(server = active.name, %error, "failed to record the failover of the database");
        }
    }
}
