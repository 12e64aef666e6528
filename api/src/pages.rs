//! Long lists: read and sent page by page, so that none has to fit into memory.

use axum::body::{Body, Bytes};
use futures_util::stream;
use muster_types::Error;
use serde::Serialize;

use crate::error::ApiResult;
use crate::response::{ok, streamed_json};

/// Answers everything that `read` finds. It is given where to go on, and says where the next page begins.
pub(crate) async fn in_pages<R, K, F, P>(read: F) -> ApiResult
where
    R: Serialize + Send + 'static,
    K: Send + 'static,
    F: Fn(Option<K>) -> P + Send + Sync + 'static,
    P: Future<Output = Result<(Vec<R>, Option<K>), Error>> + Send + 'static,
{
    // The first page is read before the answer begins, so that a failure is still a status.
    let (records, next) = read(None).await?;
    if next.is_none() {
        return Ok(ok(&records));
    }
    let pages = stream::try_unfold((Some((records, next)), true, read), |(page, first, read)| async move {
        let Some((records, next)) = page else { return Ok::<_, Error>(None) };
        let mut bytes = Vec::with_capacity(records.len() * 160);
        for (at, record) in records.iter().enumerate() {
            bytes.push(if first && at == 0 { b'[' } else { b',' });
            serde_json::to_writer(&mut bytes, record).map_err(|e| Error::Internal(e.to_string()))?;
        }
        let page = match next {
            Some(after) => Some(read(Some(after)).await?),
            None => {
                bytes.extend_from_slice(b"]\n");
                None
            }
        };
        Ok(Some((Bytes::from(bytes), (page, false, read))))
    });
    Ok(streamed_json(Body::from_stream(pages)))
}
