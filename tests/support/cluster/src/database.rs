//! Direct access to a cluster's database, for changes that the API does not offer, such as interfaces without instances.

use std::path::Path;
use std::sync::Arc;

use muster_control::App;
use muster_control::events::Events;
use muster_control::objects::interface::{NewInterface, WantedAddress, create_in, delete_in, set_state_in};
use muster_store::interfaces::InterfaceRow;
use muster_store::{Retry, Store, StoreError, Tx, TxError, Value};
use muster_types::Error;
use muster_types::ids::{InstanceId, InterfaceId, NetworkId, NodeId};
use muster_types::interface::InterfaceState;
use muster_types::key::Secret;
use muster_types::settings::Settings;

/// A cluster's database, opened next to its daemons. They notice changes by polling.
#[derive(Debug)]
pub struct ClusterDatabase {
    app: App,
    runtime: tokio::runtime::Runtime,
}

impl ClusterDatabase {
    /// Opens the database at `url`. `directory` is for the event spool.
    pub fn open(url: &str, directory: &Path) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = Settings::from_pairs(&[]).unwrap();
        // Each attempt waits for a daemon that holds the lock.
        let mut attempts = (0..100).map(|_| runtime.block_on(Store::open(url)));
        let is_locked = |opened: &Result<Store, StoreError>| matches!(opened, Err(StoreError::Conflict(_)));
        let opened = attempts.find(|opened| !is_locked(opened)).expect("an unlocked database");
        let store = Arc::new(opened.unwrap());
        let events = Events::open(&directory.join("spool"), "test", &settings).unwrap();
        let app = App::new(store, settings, events, &Secret::new(crate::hosts::SECRET_SEED), vec![]);
        Self { app, runtime }
    }

    /// Creates an interface as of an instance on a node.
    pub fn create_interface(
        &self,
        network: NetworkId,
        node: NodeId,
        hostname: &str,
        address: WantedAddress,
    ) -> InterfaceRow {
        let new = NewInterface {
            network,
            instance: InstanceId::new(),
            namespace: "system".into(),
            hostname: hostname.into(),
            node: Some(node),
            mac: None,
            address,
            float: false,
            model: "virtio".into(),
            order: 0,
        };
        self.transaction(async |tx: &mut Tx| {
            let row = create_in(&self.app, tx, &new).await?;
            set_state_in(tx, &row, InterfaceState::Created).await?;
            Ok(row)
        })
    }

    /// Deletes an interface.
    pub fn delete_interface(&self, interface: InterfaceId) {
        assert!(self.transaction(async |tx: &mut Tx| delete_in(&self.app, tx, interface, &[]).await));
    }

    /// Runs a function in a transaction, and retries it after conflicts.
    fn transaction<T>(&self, mut function: impl AsyncFnMut(&mut Tx) -> Result<T, TxError>) -> T {
        self.runtime.block_on(async {
            let mut retry = Retry::default();
            loop {
                let end = match self.app.store.begin().await {
                    Ok(mut tx) => {
                        let outcome = function(&mut tx).await;
                        tx.finish(outcome, &mut retry).await
                    }
                    Err(error) => retry.after(error).await,
                };
                if let Some(end) = end {
                    return end.unwrap();
                }
            }
        })
    }

    /// Locks the rows that a statement changes until the result is dropped.
    pub fn lock_rows(&self, sql: &str) -> LockedRows {
        self.runtime.block_on(async {
            let mut tx = self.app.store.begin().await.unwrap();
            assert!(tx.execute(sql, &[]).await.unwrap() > 0, "{sql}");
            LockedRows { tx: Some(tx), runtime: self.runtime.handle().clone() }
        })
    }

    /// Returns the first column of the rows that a query selects, as text.
    pub fn first_column(&self, sql: &str) -> Vec<String> {
        let rows = self.runtime.block_on(self.app.store.query(sql, &[])).unwrap();
        rows.iter()
            .map(|row| match &row.0[0] {
                Value::Text(text) => text.clone(),
                other => format!("{other:?}"),
            })
            .collect()
    }
}

/// Rows of a cluster's database that nothing else can change.
#[derive(Debug)]
pub struct LockedRows {
    tx: Option<Tx>,
    runtime: tokio::runtime::Handle,
}

impl Drop for LockedRows {
    fn drop(&mut self) {
        let Some(tx) = self.tx.take() else { return };
        let rolled_back = Err::<(), _>(Error::Conflict("the rows are unlocked".into()).into());
        let _ = self.runtime.block_on(tx.finish(rolled_back, &mut Retry::default()));
    }
}
