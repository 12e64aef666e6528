//! Benchmarks the memory of logins with a supplied secret, which need a large buffer each.

use std::path::Path;

use serde_json::json;

use crate::load::{self, Pool, request};
use crate::sampling::{progress, repeat};
use crate::server::Server;
use crate::table::{Row, Table};

const LOGINS: usize = 1000;
const CONCURRENT_LOGINS: usize = 30;
/// The maximum of the resident memory afterwards, in MB.
const MEMORY_LIMIT: f64 = 100.0;

pub(crate) async fn measure(program: &Path, table: &mut Table) -> anyhow::Result<()> {
    table.section("logins");
    progress("logins with a supplied secret");
    let directory = tempfile::tempdir()?;
    let server = Server::start(program, &directory.path().join("data"), &[]).await?;
    let token = server.token().await?;
    let key = json!({ "key_name": "bench", "key": "hunter2" });
    let create = request("POST", "/auth/namespaces/system/keys", Some(&token), Some(&key));
    load::call(server.address, &create).await?.ok()?;
    let login = request("POST", "/auth", None, Some(&json!({ "namespace": "system", "key": "hunter2" })));
    let mut pool = Pool::open(server.address, CONCURRENT_LOGINS).await?;
    let elapsed = pool.run(LOGINS, None, repeat(&login)).await?;
    let memory = server.memory()?;
    server.stop().await?;
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let rate = LOGINS as f64 / elapsed.as_secs_f64();
    table.add(Row::new("POST /auth, supplied secret", format!("{rate:.0} per second")));
    let label = format!("resident memory after {LOGINS} logins, {CONCURRENT_LOGINS} concurrent");
    table.add(
        Row::new(label, format!("{memory:.1} MB"))
            .target(format!("<= {MEMORY_LIMIT} MB"), memory <= MEMORY_LIMIT),
    );
    Ok(())
}
