//! `/clusteroperations`.

use muster_types::operation::OperationRecord;

use super::{Answer, Client, Result, path, with_query};

impl Client {
    /// One operation.
    pub async fn operation(&self, operation_type: &str, id: &str) -> Result<Answer<OperationRecord>> {
        self.get(path(&["clusteroperations", operation_type, id])?).await
    }

    /// An operation and all that it depends on, newest first.
    pub async fn operation_chain(&self, id: &str) -> Result<Answer<Vec<OperationRecord>>> {
        self.get(path(&["clusteroperations", id, "chain"])?).await
    }

    /// The operations on an object, newest first.
    pub async fn operations(&self, target_type: &str, target: &str) -> Result<Answer<Vec<OperationRecord>>> {
        let pairs = [("target_object_type", Some(target_type)), ("target_uuid", Some(target))];
        self.get(with_query(path(&["clusteroperations"])?, &pairs)).await
    }
}
