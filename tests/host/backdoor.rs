//! What no call of the API does yet: interfaces, which come and go with instances.

use std::path::Path;
use std::sync::Arc;

use muster_control::App;
use muster_control::events::Events;
use muster_control::objects::interface::{NewInterface, WantedAddress, create_in, delete_in, set_state_in};
use muster_store::interfaces::InterfaceRow;
use muster_store::{Retry, Store, Tx, TxError, Value};
use muster_types::ids::{InstanceId, InterfaceId, NetworkId, NodeId};
use muster_types::interface::InterfaceState;
use muster_types::key::Secret;
use muster_types::settings::Settings;

/// The cluster's database, opened behind the daemons' backs. They notice what it changes by themselves.
#[derive(Debug)]
pub(crate) struct Backdoor {
    app: App,
    runtime: tokio::runtime::Runtime,
}

impl Backdoor {
    pub(crate) fn open(database: &str, folder: &Path) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = Settings::from_pairs(&[]).unwrap();
        let store = Arc::new(runtime.block_on(Store::open(database)).unwrap());
        let events = Events::open(&folder.join("spool"), "backdoor", &settings).unwrap();
        let app = App::new(store, settings, events, &Secret::new(crate::machine::SEED), vec![]);
        Self { app, runtime }
    }

    /// Makes an interface as an instance would have it.
    pub(crate) fn add(
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
        self.change(async |tx: &mut Tx| {
            let row = create_in(&self.app, tx, &new).await?;
            set_state_in(tx, &row, InterfaceState::Created).await?;
            Ok(row)
        })
    }

    pub(crate) fn remove(&self, interface: InterfaceId) {
        assert!(self.change(async |tx: &mut Tx| delete_in(&self.app, tx, interface).await));
    }

    /// Changes something in one transaction, as often as somebody else is in the way.
    fn change<T>(&self, mut work: impl AsyncFnMut(&mut Tx) -> Result<T, TxError>) -> T {
        self.runtime.block_on(async {
            let mut retry = Retry::default();
            loop {
                let end = match self.app.store.begin().await {
                    Ok(mut tx) => {
                        let outcome = work(&mut tx).await;
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

    /// The first column of what a statement finds, as text.
    pub(crate) fn find(&self, sql: &str) -> Vec<String> {
        let rows = self.runtime.block_on(self.app.store.query(sql, &[])).unwrap();
        rows.iter()
            .map(|row| match &row.0[0] {
                Value::Text(text) => text.clone(),
                other => format!("{other:?}"),
            })
            .collect()
    }
}
